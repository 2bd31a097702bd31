"""Inert modules in the place of packages that SGLang imports everywhere and a CPU server never calls.

- sgl_kernel: CUDA kernels; its CPU build is not on PyPI. `--attention-backend torch_native` calls none of it.
- torchvision, torchaudio: their compiled parts do not load beside CPU torch.
- IPython, soundfile: notebooks and audio.
- triton: a compiler for GPUs of 1 GB. Its decorators are applied when modules are imported; no kernel is launched.

Every attribute of such a module exists and can be used as a decorator, an annotation or a base class; what comes out
of it says its own name. Two functions of triton are plain arithmetic that SGLang uses on the host, and are real.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision", "torchaudio", "triton", "IPython", "soundfile")


class _InertType(type):
    """A class that stands for anything: function, decorator, constant, base class."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls.__mro__[1] is not Inert:
            # A class of SGLang's own with an inert base is a class like any other.
            return super().__call__(*arguments, **named)
        # As a bare decorator: what was decorated stays as it is.
        bare = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if bare else cls

    def __getattr__(cls, name: str) -> _InertType:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "active":
            # As triton's driver without a GPU; SGLang asks it and falls back to the CPU.
            raise RuntimeError("0 active drivers")
        return inert(f"{cls.__name__}.{name}")

    def __getitem__(cls, key: object) -> _InertType:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __repr__(cls) -> str:
        return f"<inert {cls.__name__}>"


class Inert(metaclass=_InertType):
    """Base of every inert thing."""


def inert(name: str) -> _InertType:
    """A thing of that name that does nothing."""
    return _InertType(name, (Inert,), {})


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(int(n) - 1, 0).bit_length()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _InertType:
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"
        if module.__name__ == "triton":
            module.__dict__.update(cdiv=cdiv, next_power_of_2=next_power_of_2)


sys.meta_path.append(_Finder())
