"""Declare two operators that torchvision's compiled part would bring.

torchvision's wheel is built beside the CUDA torch; its compiled part does not load beside CPU torch, and the import
of the package then fails on `torchvision::nms does not exist`. The text-only lab engine never calls these operators,
so a declaration without a kernel is enough: a call would fail loudly.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
