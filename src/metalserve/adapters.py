"""LoRA adapters of a deployment: how they are declared, what their configuration says, and how clients name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from metalserve import catalogue
from metalserve.engines.flags import FlagTable, flags_for
from metalserve.engines.info import EngineInfo
from metalserve.errors import Refusal
from metalserve.hubs import COMMIT
from metalserve.planner.lora import EXPERT_NAMES, LARGEST_VOCABULARY, Adapters, buffer_rank, check_modules
from metalserve.planner.shape import Shape, read_shape

CONFIG_NAME = "adapter_config.json"
# Of the weights role: an adapter is no model, and is looked at as what it is.
WEIGHT_FORMAT = "lora"
_FIELDS = {"name": str, "key": str, "repositories": dict, "revision": str}
# What engine arguments, the gateway's maps and a request can all hold; ':' parts model and adapter in SGLang.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]*")
_KEY = re.compile(r"[a-z0-9]([a-z0-9._-]{0,78}[a-z0-9])?")
# Settings of PEFT that the engines ignore or refuse, with what they would need (vLLM lora/peft_helper.py: it reads r,
# lora_alpha and target_modules for all modules together).
_UNSERVED = {
    "use_dora": "weights without DoRA",
    "modules_to_save": "no whole modules beside the matrices",
    "rank_pattern": "one rank for all modules",
    "alpha_pattern": "one alpha for all modules",
    "lora_bias": "no biases",
    "trainable_token_indices": "no trained tokens",
}


@dataclass(frozen=True)
class Lora:
    """The adapters of a deployment that is planned: {name, key, rank, modules} of each, and what the engine keeps."""

    records: tuple[Mapping[str, Any], ...]
    adapters: Adapters


def check_adapters(name: str, item: Mapping[str, Any], served_names: Sequence[str]) -> list[dict[str, Any]]:
    """The adapters of a deployment called ``name`` with every field filled in; none of them is looked for.

    Returns:
        [{name, key, repositories, revision}], with revision None where the inventory names it elsewhere.

    Raises:
        Refusal: an unknown, missing or malformed field, a name or key that is taken, or slots without adapters.
    """
    given = item.get("lora_adapters") or []
    filled = [_check_one(name, entry) for entry in given]
    taken = dict.fromkeys(served_names, "a served name")
    keys: dict[str, str] = {}
    for entry in filled:
        if entry["name"] in taken:
            raise _refuse(
                name,
                f"the adapter name {entry['name']}, which is {taken[entry['name']]} already",
                "a name of its own for each: clients ask for model or adapter by it",
            )
        taken[entry["name"]] = "another adapter's"
        if entry["key"] in keys:
            raise _refuse(
                name,
                f"the adapters {keys[entry['key']]} and {entry['name']} with the key {entry['key']}",
                "a `key` of its own for each: it names the directory on the host and the entry of the lock",
            )
        keys[entry["key"]] = entry["name"]
    slots = item.get("lora_slots")
    wrong = slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < 1)
    if wrong or (slots is not None and slots > len(filled)):
        raise Refusal(
            found=f"lora_slots {slots!r} of the deployment {name} with {len(filled)} adapters",
            needed="a whole number from 1 up to the number of lora_adapters",
            change=f"`lora_slots` of {name} in serving_deployments; left out, all adapters can run at once",
        )
    return filled


def _check_one(name: str, entry: object) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise _refuse(name, f"{entry!r}", "a mapping with name, and repositories and revision where it lies on a hub")
    for field, value in entry.items():
        kind = _FIELDS.get(str(field))
        if kind is None or (value is not None and not isinstance(value, kind)):
            raise _refuse(
                name,
                f"{field}: {value!r}",
                "name, key and revision (texts) and repositories (huggingface, modelscope)",
            )
    adapter = str(entry.get("name") or "")
    if not _NAME.fullmatch(adapter):
        raise _refuse(
            name, f"the name {adapter!r}", "letters, digits and ._/@+- only: clients ask for the adapter by it"
        )
    key = str(entry.get("key") or adapter.lower())
    if not _KEY.fullmatch(key):
        raise _refuse(
            name,
            f"the key {key!r} of the adapter {adapter}",
            "a `key` of lower-case letters, digits, dots and dashes, 80 at most: it becomes a directory",
        )
    repositories = dict(entry.get("repositories") or {})
    stray = sorted(set(repositories) - {"huggingface", "modelscope"})
    if stray:
        raise _refuse(name, f"the repository host {stray[0]!r} of the adapter {adapter}", "huggingface or modelscope")
    return {"name": adapter, "key": key, "repositories": repositories, "revision": entry.get("revision")}


def _refuse(name: str, found: str, needed: str) -> Refusal:
    return Refusal(
        found=f"lora_adapters of the deployment {name} with {found}",
        needed=needed,
        change=f"`lora_adapters` of {name} in serving_deployments",
    )


def asked_names(item: Mapping[str, Any]) -> list[str]:
    """Every name a client may ask for, the first of the model first: served names, then adapters.

    vLLM takes an adapter's own name. SGLang answers to that with the plain model, without a word; there an adapter is
    MODEL:ADAPTER (srt/entrypoints/openai/serving_base.py:_parse_model_parameter, 0.5.23).
    """
    served = [str(name) for name in item["served_names"]]
    prefix = f"{served[0]}:" if item["engine"] == "sglang" else ""
    return [*served, *(f"{prefix}{entry['name']}" for entry in item.get("lora_adapters") or ())]


def adapter_entry(entry: Mapping[str, Any]) -> catalogue.Model:
    """An adapter in the form of a catalogue entry, for what only needs its key and its places."""
    return catalogue.Model(
        key=entry["key"],
        repositories=MappingProxyType(
            {host: entry["repositories"].get(host) for host in ("huggingface", "modelscope")}
        ),
        revision=entry["revision"],
        format=WEIGHT_FORMAT,
        context_length_tokens=1,
        parsers=MappingProxyType({}),
        minimum_versions=MappingProxyType({}),
        shape=MappingProxyType({}),
        sources=(),
    )


def adapter_record(key: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What sizes and engine arguments need of adapter_config.json, as it is kept in the lock.

    Returns:
        {rank, modules, base_model}: modules are the last parts of the target modules' names, None for a pattern;
        base_model is what the adapter says it was made for, advice only.

    Raises:
        Refusal: it is no LoRA adapter, or one that the engines do not serve right.
    """

    def refuse(found: str, needed: str) -> Refusal:
        return Refusal(
            found=f"{CONFIG_NAME} of the adapter {key} with {found}",
            needed=needed,
            change="another adapter in lora_adapters, or merge it into the weights and serve these as a model",
        )

    if str(config.get("peft_type") or "LORA").upper() != "LORA":
        raise refuse(f"peft_type {config['peft_type']}", "LORA, the only kind that the engines serve")
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise refuse(f"r {rank!r}", "its rank, a whole number from 1 on")
    for field, needed in _UNSERVED.items():
        if config.get(field):
            raise refuse(
                f"{field} {config[field]!r}", f"{needed}: the engines ignore it, and answer with other weights"
            )
    if config.get("bias") not in (None, "none"):
        raise refuse(f"bias {config['bias']!r}", "bias none: the engines refuse others at start")
    targets = config.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise refuse(f"target_modules {targets!r}", "the names of the modules that it adapts")
    modules = None if isinstance(targets, str) else sorted({str(target).rsplit(".", 1)[-1] for target in targets})
    return {"rank": rank, "modules": modules, "base_model": config.get("base_model_name_or_path")}


def lora_of(
    item: Mapping[str, Any], lock: Mapping[str, Any], model: catalogue.Model, engine: EngineInfo
) -> Lora | None:
    """The adapters of a deployment as the lock describes them; None without any.

    Raises:
        Refusal: one is locked as something else or at another revision, or does not fit the model or the engine.
    """
    records = []
    for entry in item["lora_adapters"]:
        locked = (lock.get("models") or {}).get(entry["key"]) or {}
        known = locked.get("adapter")
        if not isinstance(known, Mapping) or "rank" not in known:
            raise Refusal(
                found=f"a lock of the adapter {entry['key']} without its rank and modules",
                needed=f"what its {CONFIG_NAME} says, for the memory that it takes",
                change="run `ansible-playbook playbooks/ops/lock.yml` with this inventory",
            )
        wanted, have = entry["revision"], str(locked.get("revision"))
        if wanted and COMMIT.fullmatch(wanted) and wanted != have and wanted not in _hub_revisions(locked):
            raise Refusal(
                found=f"the adapter {entry['name']} at revision {wanted}, locked at {have}",
                needed="the same in both",
                change="run `ansible-playbook playbooks/ops/lock.yml` with this inventory",
            )
        records.append({"name": entry["name"], "key": entry["key"], **known})
    table = flags_for(engine.engine, engine.version)
    adapters = planned_adapters(item, records, model.key, read_shape(model.shape), table)
    return None if adapters is None else Lora(tuple(records), adapters)


def base_notes(item: Mapping[str, Any], lora: Lora | None, model: catalogue.Model) -> list[str]:
    """What an adapter says of its base model, where that is another one than it is served with: advice only."""
    names = {str(name).lower() for name in model.repositories.values() if name}
    return [
        f"{item['name']}: the adapter {record['name']} says it was made for {record['base_model']}, and runs on "
        f"{model.key}"
        for record in (lora.records if lora else ())
        if names and record.get("base_model") and str(record["base_model"]).lower() not in names
    ]


def _hub_revisions(locked: Mapping[str, Any]) -> list[str]:
    return [str(revision) for revision in (locked.get("hub_revisions") or {}).values()]


def planned_adapters(
    item: Mapping[str, Any], records: Sequence[Mapping[str, Any]], model: str, shape: Shape, table: FlagTable
) -> Adapters | None:
    """The adapters as the planner and the engine see them; None without any.

    Args:
        item: the deployment, with its defaults.
        records: `adapter_record` of each, with its name.
        model: key of the model.
        shape: of the model.
        table: flags of the engine's version.

    Raises:
        Refusal: a rank that the engine does not take, or modules that the model or the engine does not have.
    """
    if not records:
        return None
    for record in records:
        if record["modules"] is not None:
            check_modules(model, record["name"], record["modules"], shape)
            _check_engine_modules(record, table)
    rank = max(record["rank"] for record in records)
    slots = item.get("lora_slots") or len(records)
    if table.engine == "sglang":
        # The plain model takes one of the slots of a step (srt/lora/mem_pool.py).
        return Adapters(rank, slots + 1, _modules(records, experts=shape.experts is not None))
    modules = _modules(records, experts=shape.experts is not None)
    if modules and "lm_head" in modules and shape.vocabulary > LARGEST_VOCABULARY:
        raise Refusal(
            found=f"adapters of lm_head for {model}, whose vocabulary has {shape.vocabulary} words",
            needed=f"at most {LARGEST_VOCABULARY}, or adapters of other modules: vLLM stops at start",
            change="another adapter in lora_adapters, or merge it into the weights and serve these as a model",
        )
    # Without the flag the engine keeps buffers for everything it can wrap.
    known = table.find("lora-target-modules") is not None
    return Adapters(buffer_rank(rank), slots, modules if known else None)


def _modules(records: Iterable[Mapping[str, Any]], *, experts: bool) -> frozenset[str] | None:
    """The modules of all adapters together; None when one of them names a pattern."""
    found: set[str] = set()
    for record in records:
        if record["modules"] is None:
            return None
        found |= set(record["modules"])
    # PEFT means the experts by the names of their projections, vLLM by that of the layer that holds them all.
    return frozenset(found | ({"experts"} if experts and found & EXPERT_NAMES else set()))


def _check_engine_modules(record: Mapping[str, Any], table: FlagTable) -> None:
    """Refuse modules that SGLang has no buffers for; vLLM wraps every linear layer."""
    flag = table.find("lora-target-modules")
    known = set(flag.choices) if flag is not None else set()
    strange = sorted(set(record["modules"]) - known) if known else []
    if strange:
        raise Refusal(
            found=f"the adapter {record['name']} of modules {', '.join(strange)} with {table.engine} "
            f"{table.table_version}",
            needed=f"modules out of {', '.join(sorted(known - {'all'}))}",
            change="`engine: vllm`, or merge the adapter into the weights and serve these as a model",
        )
