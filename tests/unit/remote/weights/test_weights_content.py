"""What is looked at beside the hashes: every sentence of a checkpoint that would not load, or answer nonsense."""

from __future__ import annotations

import json

import pytest
from weights_model import LAYER, PLAIN, QUANTISED, change_json, checkpoint, safetensors, write
from weights_server import manifest, read_files

from metalserve.remote.weights_content import Expectation, check_content
from metalserve.remote.weights_format import find_quantization
from metalserve.remote.weights_manifest import WeightsError

SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def check(tmp_path):
    def run(files, kind="bf16", **options):
        check_content(write(tmp_path / "model", files), list(files), Expectation(kind, **options))

    return run


def refusal(check, files, *arguments, **options):
    with pytest.raises(WeightsError) as caught:
        check(files, *arguments, **options)
    text = str(caught.value)
    assert "Needed: " in text
    assert "Change: " in text
    return text


@pytest.mark.parametrize("kind", ["bf16", *QUANTISED])
def test_a_whole_checkpoint_of_each_format(check, kind):
    check(checkpoint(kind), kind)


def test_a_checkpoint_in_one_file_without_an_index(check):
    files = checkpoint()
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", SECOND):
        del files[name]
    check({**files, "model.safetensors": safetensors(PLAIN)})


def test_a_head_that_only_drafts_needs_neither_tokenizer_nor_template(check):
    files = {"config.json": checkpoint()["config.json"], "model.safetensors": safetensors(PLAIN)}
    check(files, "draft-bf16")
    assert "no tokenizer" in refusal(check, files, "bf16")
    assert "its catalogue entry says fp8" in refusal(check, files, "draft-fp8")


# ---- LoRA adapters ----

ADAPTER = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [8, 64]),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": ("F32", [32, 8]),
}


def adapter(tensors=ADAPTER, **config):
    text = json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}).encode()
    return {"adapter_config.json": text, "adapter_model.safetensors": safetensors(tensors)}


def test_an_adapter_needs_neither_tokenizer_nor_template(check):
    check(adapter(), "lora")


def test_an_adapter_without_one_of_its_files(check):
    files = adapter()
    del files["adapter_config.json"]
    assert refusal(check, files, "lora").startswith("The adapter has no adapter_config.json. Needed: a LoRA adapter")
    renamed = {"adapter_config.json": b"{}", "model.safetensors": adapter()["adapter_model.safetensors"]}
    assert refusal(check, renamed, "lora").startswith("The adapter has no adapter_model.safetensors.")


def test_an_adapter_with_whole_modules_beside_its_matrices(check):
    tensors = {**ADAPTER, "base_model.model.lm_head.weight": ("F32", [16, 8])}
    text = refusal(check, adapter(tensors), "lora")
    assert text.startswith("The adapter has 3 tensors, 1 of them not of LoRA (base_model.model.lm_head.weight).")
    assert refusal(check, adapter({}), "lora").startswith("The adapter has 0 tensors")


def test_matrices_of_another_rank_than_the_configuration_says(check):
    text = refusal(check, adapter(r=16), "lora")
    assert "lora_A.weight has the shape [8, 64], adapter_config.json says rank 16." in text


# ---- safetensors ----


def test_a_file_that_was_cut(check):
    files = checkpoint()
    files[SECOND] = files[SECOND][:-100]
    size = len(files[SECOND])
    text = refusal(check, files)
    assert text.startswith(
        f"{SECOND} is no whole safetensors file: its tensors end at {size + 100}, the file has {size} bytes."
    )


def test_a_file_with_something_behind_its_tensors(check):
    files = checkpoint()
    files[SECOND] += b"x"
    assert f"its tensors end at {len(files[SECOND]) - 1}" in refusal(check, files)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "it says that its header has 0 bytes, the file has 0"),
        (b"<html>404</html>", "the file has 16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it says that its header has"),
        ((5).to_bytes(8, "little") + b"{]}{}", "its header cannot be read: Expecting"),
        ((2).to_bytes(8, "little") + b"[]", "its header cannot be read: 'list'"),
    ],
    ids=["empty", "web page", "LFS pointer", "broken JSON", "no mapping"],
)
def test_a_file_that_is_no_safetensors(check, data, found):
    files = {**checkpoint(), SECOND: data}
    assert f"{SECOND} is no whole safetensors file: " in refusal(check, files)
    assert found in refusal(check, files)


def header(**tensors):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_tensor_of_another_size_than_its_shape(check):
    files = checkpoint()
    wrong = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 7]}
    files[SECOND] = header(**dict.fromkeys([*PLAIN][:1], wrong)) + bytes(7)
    assert "has 7 bytes, BF16 [2, 2] needs 8" in refusal(check, files)


def test_a_gap_between_tensors(check):
    files = checkpoint()
    one = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    files[SECOND] = header(a=one, b={**one, "data_offsets": [8, 12]}) + bytes(12)
    assert "the tensor b lies at 8 to 12, the one before it ends at 4" in refusal(check, files)


def test_a_type_that_is_not_known_yet_is_only_measured_by_the_file(check):
    files = checkpoint()
    odd = {"dtype": "F2_E1M0", "shape": [16], "data_offsets": [0, 4]}
    files[SECOND] = header(**dict.fromkeys([*PLAIN][:1], odd)) + bytes(4)
    change_json(files, "model.safetensors.index.json", weight_map={next(iter(PLAIN)): SECOND})
    check(files)


# ---- the index and the shards ----


def test_a_numbered_shard_that_is_not_there(check):
    files = checkpoint()
    del files["model-00001-of-00002.safetensors"], files["model.safetensors.index.json"]
    text = refusal(check, files)
    assert (
        "The checkpoint is not whole: 1 of its numbered files are not there: model-00001-of-00002.safetensors" in text
    )


def test_an_index_that_names_a_file_that_is_not_there(check):
    files = checkpoint()
    change_json(files, "model.safetensors.index.json", weight_map={"a": "mtp.safetensors"})
    assert "model.safetensors.index.json names files that are not there: mtp.safetensors" in refusal(check, files)


def test_a_tensor_that_the_index_promises(check):
    files = checkpoint()
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    change_json(files, "model.safetensors.index.json", weight_map={**index, "model.norm.weight": SECOND})
    text = refusal(check, files)
    assert f"{SECOND} lacks 1 tensors that model.safetensors.index.json promises: model.norm.weight" in text


@pytest.mark.parametrize("text", [b"[]", b"{}"])
def test_an_index_that_is_none(check, text):
    files = {**checkpoint(), "model.safetensors.index.json": text}
    assert "model.safetensors.index.json cannot be read" in refusal(check, files)


# ---- configuration, tokenizer, template ----


def test_no_config(check):
    files = checkpoint()
    del files["config.json"]
    assert refusal(check, files).startswith("config.json cannot be read: [Errno 2]")


def test_a_config_of_nothing(check):
    files = checkpoint()
    change_json(files, "config.json", architectures=None, model_type=None)
    assert refusal(check, files).startswith("config.json names neither architectures nor model_type.")


def test_a_json_file_that_is_none(check):
    files = {**checkpoint(), "generation_config.json": b"<html>"}
    assert refusal(check, files).startswith("generation_config.json is no JSON: ")


def test_no_tokenizer(check):
    files = checkpoint()
    del files["tokenizer.json"]
    assert refusal(check, files).startswith("The checkpoint has no tokenizer.")


def test_no_chat_template_unless_it_is_not_required(check):
    files = checkpoint()
    change_json(files, "tokenizer_config.json", chat_template=None)
    assert "model_weights_require_chat_template: false" in refusal(check, files)
    check(files, chat_template=False)
    check({**files, "chat_template.jinja": b"{{ messages }}"})


# ---- other formats ----


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["tiny-Q4_K_M.gguf"], "GGUF (tiny-Q4_K_M.gguf), the format of llama.cpp"),
        (["pytorch_model.bin"], "pickles (pytorch_model.bin), which run code when they are loaded"),
        ([], "no weights at all"),
    ],
)
def test_weights_that_are_no_safetensors(check, names, found):
    files = {name: data for name, data in checkpoint().items() if "safetensors" not in name}
    assert refusal(check, {**files, **dict.fromkeys(names, b"x")}).startswith(f"The checkpoint has {found}")


def test_a_format_that_is_not_that_of_the_catalogue(check):
    assert refusal(check, checkpoint("awq"), "fp8").startswith(
        "The checkpoint is awq (config.json quantization_config), its catalogue entry says fp8."
    )
    assert refusal(check, checkpoint(), "awq").startswith(
        "The checkpoint is bf16 (config.json without a quantization_config), its catalogue entry says awq."
    )


def test_quantised_tensors_that_nothing_describes(check):
    files = checkpoint("gptq")
    change_json(files, "config.json", quantization_config=None)
    assert refusal(check, files).startswith("config.json names no quantization_config, and 1 tensors are quantised (")


# ---- where the quantisation is found ----


def place(tmp_path, config, **side_files):
    files = {"config.json": config, **{f"{name}.json": content for name, content in side_files.items()}}
    return write(tmp_path, {name: json.dumps(content).encode() for name, content in files.items()})


@pytest.mark.parametrize(
    ("config", "side_files", "method", "where"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {"quantize_config": {"bits": 4}},
            "fp8",
            "quantization_config",
        ),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, {}, "awq", "config.json text_config"),
        ({"compression_config": {"format": "x"}}, {}, "compressed-tensors", "config.json compression_config"),
        ({}, {"quantize_config": {"bits": 4, "desc_act": False}}, "gptq", "quantize_config.json"),
        ({}, {"quant_config": {"w_bit": 4, "q_group_size": 128}}, "awq", "quant_config.json"),
        ({}, {"quantize_config": {"zero_point": True, "bits": 4}}, "awq", "quantize_config.json"),
        ({}, {"hf_quant_config": {"quantization": {"quant_algo": "FP8"}}}, "modelopt", "hf_quant_config.json"),
        ({}, {"quantization_config": {"bits": 4}}, "auto-round", "quantization_config.json"),
    ],
)
def test_where_a_quantisation_is_found(tmp_path, config, side_files, method, where):
    found = find_quantization(place(tmp_path, config, **side_files))
    assert found.method == method
    assert found.place.endswith(where)


def test_a_plain_checkpoint_has_none(tmp_path):
    assert find_quantization(place(tmp_path, {"model_type": "tiny"})) is None


def test_a_quantisation_without_a_method(tmp_path):
    with pytest.raises(WeightsError, match=r"config\.json quantization_config names no quant_method"):
        find_quantization(place(tmp_path, {"quantization_config": {"bits": 4}}))


# ---- configuration against tensors ----


def quantised(kind, tensors=None, **changes):
    """A checkpoint of a kind with another configuration or other tensors."""
    files = checkpoint(kind)
    config, own = QUANTISED[kind]
    wanted = {key: value for key, value in {**config, **changes}.items() if value is not None}
    change_json(files, "config.json", quantization_config=wanted)
    if tensors is not None:
        own = {**own, **tensors}
        own = {name: value for name, value in own.items() if value is not None}
        files[SECOND] = safetensors(own)
        change_json(files, "model.safetensors.index.json", weight_map=dict.fromkeys(own, SECOND))
    return files


@pytest.mark.parametrize(
    ("kind", "files", "found"),
    [
        ("awq", quantised("awq", bits=8), "bits 8 (config.json quantization_config). Needed: 4"),
        ("awq", quantised("awq", bits=None), "no number under bits or w_bit"),
        ("awq", quantised("awq", group_size=100), "group_size 100"),
        ("awq", quantised("awq", zero_point=None), "zero_point None"),
        ("awq", quantised("awq", {f"{LAYER}.qzeros": None}), "zero_point true and no qzeros tensor"),
        ("awq", quantised("awq", group_size=64), f"scales of shape [2, 512] for {LAYER}.qweight"),
        ("awq", quantised("awq", {f"{LAYER}.scales": None}), f"{LAYER}.qweight without scales"),
        ("gptq", quantised("gptq", bits=5), "bits 5"),
        ("gptq", quantised("gptq", bits=8), f"scales of shape [2, 512] for {LAYER}.qweight"),
        ("gptq", quantised("gptq", group_size=-1), "[1, 512] by the bits and group size stated"),
        ("fp8", quantised("fp8", {f"{LAYER}.weight": ("BF16", [512, 256])}), "no tensor of type F8_E4M3"),
        ("fp8", quantised("fp8", weight_block_size=[64, 128]), "[8, 2] by the bits and group size stated"),
        ("fp8", quantised("fp8", {f"{LAYER}.weight_scale_inv": None}), f"{LAYER}.weight without weight_scale_inv"),
        (
            "compressed-tensors",
            quantised("compressed-tensors", {f"{LAYER}.weight_packed": None}),
            "no tensor *.weight_packed",
        ),
        (
            "compressed-tensors",
            quantised("compressed-tensors", config_groups={"group_0": {"weights": {"num_bits": 4, "group_size": 64}}}),
            "[512, 4] by the bits and group size stated",
        ),
        (
            "compressed-tensors",
            quantised("compressed-tensors", config_groups={"group_0": {"weights": {"num_bits": 3, "group_size": 64}}}),
            "num_bits 3",
        ),
    ],
)
def test_a_configuration_that_its_tensors_do_not_bear_out(check, kind, files, found):
    text = refusal(check, files, kind)
    assert text.startswith(f"The {kind} checkpoint has ")
    assert found in text


def test_gptq_with_rules_for_single_modules_is_left_to_the_engine(check):
    check(quantised("gptq", group_size=64, dynamic={"-:.*down_proj.*": {}}), "gptq")


# ---- within a run ----


@pytest.fixture
def whole(source):
    source.files.clear()
    source.files.update(checkpoint())
    return source


def test_a_checkpoint_that_is_not_whole_is_not_published(ensure, whole, final):
    del whole.files["tokenizer.json"]
    files = manifest(whole.files)
    with pytest.raises(WeightsError, match="The checkpoint has no tokenizer"):
        ensure(files=files, expected=Expectation("bf16"))
    assert not final.exists()


def test_what_has_been_looked_at_is_written_down(ensure, whole, final, monkeypatch):
    files = manifest(whole.files)
    ensure(files=files, expected=Expectation("bf16"))
    assert read_files(final) == whole.files
    assert json.loads((final / ".metalserve.json").read_text())["content"] == "1:bf16:True"
    monkeypatch.setattr("metalserve.remote.weights.check_content", lambda *arguments: pytest.fail("looked again"))
    assert ensure(files=files, expected=Expectation("bf16")).changed is False
    assert ensure(files=files, expected=Expectation("bf16"), dry_run=True).record_stale is False


@pytest.mark.parametrize("dry_run", [False, True])
def test_another_expectation_is_looked_at(ensure, whole, dry_run):
    files = manifest(whole.files)
    ensure(files=files, expected=Expectation("bf16"))
    with pytest.raises(WeightsError, match="The checkpoint is bf16"):
        ensure(files=files, expected=Expectation("fp8"), dry_run=dry_run)


@pytest.mark.parametrize("name", ["adapter.safetensors", "sub/model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_stranger_in_a_published_directory_is_named(ensure, whole, final, dry_run, name):
    files = manifest(whole.files)
    ensure(files=files)
    write(final, {name: b"x"})
    with pytest.raises(WeightsError) as caught:
        ensure(files=files, dry_run=dry_run)
    assert str(caught.value).startswith(f"{final} holds 1 files that the manifest does not name: {name}. Needed: ")


def test_hidden_files_of_others_are_left_alone(ensure, whole, final):
    files = manifest(whole.files)
    ensure(files=files)
    write(final, {".nfs0001": b"x"})
    assert ensure(files=files).changed is False
