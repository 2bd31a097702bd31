"""From the inventory's deployments and one host's facts to its releases, or a refusal before anything changes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from typing import Any

from metalserve import catalogue
from metalserve.adapters import asked_names, base_notes, check_adapters, lora_of
from metalserve.engines import behaviour
from metalserve.engines.developer_routes import check_developer_routes
from metalserve.engines.info import EngineInfo, engine_info, engine_names
from metalserve.errors import Refusal
from metalserve.learning import Record, choose, read_kept
from metalserve.planner import assign_gpus, expected_start, make_plan
from metalserve.release import Release, build_release, canonical_json, split_image
from metalserve.remote.image_names import DERIVED_REPOSITORY, derived_digest
from metalserve.signatures import check_signatures
from metalserve.staged import draft_of, locked, needed_models, staged, weight_sources
from metalserve.verdict.now import require_image, require_software

# What the unit mounts into the container, by the names of the engine's start command.
CONTAINER_PATHS = {"config": "/release/engine.yaml", "model": "/models/${METALSERVE_MODEL_KEY}"}
DEFAULTS: dict[str, Any] = {
    "engine_version": None,
    "image": None,
    "served_names": [],
    "bind_address": "0.0.0.0",  # noqa: S104 (engines serve the network; who may reach them is the firewall's matter)
    "gpus": "all",
    "context_length": None,
    "max_sequences": None,
    "max_batched_tokens": None,
    "kv_cache_dtype": "auto",
    "memory_share": None,
    "kv_cache_memory_bytes": None,
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "data_parallel_size": None,
    "expert_parallel": False,
    "prefix_caching": None,
    "speculative_tokens": 0,
    "text_only": False,
    "eager": False,
    "sglang": {},
    "engine_args": {},
    "environment": {},
    "api_key_file": None,
    "lora_adapters": [],
    "lora_slots": None,
    "draft_model": None,
    **dict.fromkeys(behaviour.FIELDS),
}
# No CUDA graphs until a release of the deployment has passed its gate on that host.
EAGER_FIRST = "first_start"
REQUIRED = ("name", "engine", "model", "port")

_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "engine": (str,),
    "model": (str,),
    "image": (str,),
    "served_names": (list,),
    "bind_address": (str,),
    "gpus": (str, int, list),
    "sglang": (dict,),
    "engine_args": (dict,),
    "environment": (dict,),
    "api_key_file": (str,),
    "lora_adapters": (list,),
    "draft_model": (str,),
}
_TYPE_NAMES = {str: "a text", int: "a number", list: "a list", dict: "a mapping"}
# A requirement of pip with everything pinned; it becomes a line of a file.
_PACKAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9._+!-]+( --hash=sha256:[0-9a-f]{64})+"
)
# Of the engines' official images; `python` of serving_engines where it is another.
IMAGE_PYTHON = "3.12"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104


@dataclass(frozen=True)
class Inputs:
    """What the inventory says beside the deployments.

    Attributes:
        models: further catalogue entries (`serving_models`).
        engines: {engine: {version, image}} that replace the catalogue's pins (`serving_engines`).
        lock: {images: {reference: {digest, compressed_bytes}}, models: {key: {revision, files}}} (`serving_lock`).
        weight_sources: {model: [base URL or directory]} with {revision}, {huggingface} and {modelscope} to fill in.
        models_dir: where models live on the host.
        kept: {deployment: what the host keeps of it}, see `remote.starts.kept_starts`.
        image_keys: {repository pattern or `default`: [public key]} that must have signed images (`serving_image_keys`).
        relearn: plan by what earlier starts measured even where that restarts an engine (`serving_plan_relearn`).
    """

    models: Mapping[str, Any]
    engines: Mapping[str, Any]
    lock: Mapping[str, Any]
    weight_sources: Mapping[str, Sequence[str]]
    models_dir: str
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    relearn: bool = False
    image_keys: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def normalize(deployments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the form of the deployments and fill in defaults; no host is looked at.

    Raises:
        Refusal: a missing, unknown or malformed field, or two deployments on one name, port or GPU.
    """
    if isinstance(deployments, str | Mapping) or not all(isinstance(item, Mapping) for item in deployments):
        raise Refusal(
            found="serving_deployments that are no list of mappings",
            needed="a list, each entry with name, engine, model and port",
            change="serving_deployments",
        )
    checked = [_normalize_one(item) for item in deployments]
    for field, what in (("name", "the name"), ("port", "port")):
        owners: dict[Any, str] = {}
        for item in checked:
            if item[field] in owners:
                other = owners[item[field]]
                raise Refusal(
                    found=f"the deployments {other} and {item['name']} both have {what} {item[field]}",
                    needed=f"a {field} of its own for each deployment of a host",
                    change=f"`{field}` of one of them in serving_deployments",
                )
            owners[item[field]] = item["name"]
    return checked


def _normalize_one(item: Mapping[str, Any]) -> dict[str, Any]:
    name = str(item.get("name", "(unnamed)"))
    known = (*REQUIRED, *DEFAULTS)
    for field in item:
        if field not in known:
            close = get_close_matches(str(field), known, n=1)
            raise Refusal(
                found=f"the deployment {name} has the field '{field}'",
                needed=f"one of {', '.join(known)}" + (f"; the nearest is '{close[0]}'" if close else ""),
                change=f"the field in serving_deployments; flags of the engine go under engine_args of {name}",
            )
    missing = [field for field in REQUIRED if item.get(field) in (None, "")]
    if missing:
        raise Refusal(
            found=f"the deployment {name} without {', '.join(missing)}",
            needed=f"{', '.join(REQUIRED)} for each deployment",
            change="serving_deployments",
        )
    for field, kinds in _TYPES.items():
        value = item.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise Refusal(
                found=f"{field} {value!r} of the deployment {name}",
                needed=" or ".join(_TYPE_NAMES[kind] for kind in kinds),
                change=f"`{field}` of {name} in serving_deployments",
            )
    _check_gpus(name, item.get("gpus"))
    _check_address(name, item.get("bind_address"))
    if not _NAME.fullmatch(name):
        raise Refusal(
            found=f"a deployment called {name!r}",
            needed="lower-case letters, digits and dashes, 40 at most: the name becomes a unit and a directory",
            change="`name` in serving_deployments",
        )
    port = item["port"]
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise Refusal(
            found=f"port {port!r} of the deployment {name}",
            needed="a number from 1 to 65535",
            change=f"`port` of {name} in serving_deployments",
        )
    if item["engine"] not in engine_names():
        raise Refusal(
            found=f"engine '{item['engine']}' of the deployment {name}",
            needed=f"one of {', '.join(engine_names())}",
            change=f"`engine` of {name} in serving_deployments",
        )
    _check_key_file(name, item["engine"], item.get("api_key_file"))
    if item.get("eager") not in (None, True, False, EAGER_FIRST):
        raise Refusal(
            found=f"eager {item['eager']!r} of the deployment {name}",
            needed=f"true, false, or {EAGER_FIRST}: without CUDA graphs until a release has passed its gate",
            change=f"`eager` of {name} in serving_deployments",
        )
    behaviour.check_behaviour(name, item)
    filled = {**DEFAULTS, **{field: value for field, value in item.items() if value is not None}}
    filled["served_names"] = [str(served) for served in filled["served_names"]] or [item["model"]]
    filled["lora_adapters"] = check_adapters(name, filled, filled["served_names"])
    check_developer_routes(name, filled)
    return filled


def _check_address(name: str, address: str | None) -> None:
    try:
        ip_address(DEFAULTS["bind_address"] if address is None else address)
    except ValueError as error:
        raise Refusal(
            found=f"bind_address {address!r} of the deployment {name}",
            needed="an address of the host, 0.0.0.0 for all",
            change=f"`bind_address` of {name} in serving_deployments",
        ) from error


def _check_key_file(name: str, engine: str, path: str | None) -> None:
    if path is None:
        return
    if not path.startswith("/") or any(character.isspace() for character in path):
        raise Refusal(
            found=f"api_key_file {path!r} of the deployment {name}",
            needed="an absolute path on the host, without white space, of a file that holds the key on one line",
            change=f"`api_key_file` of {name} in serving_deployments",
        )
    if engine != "vllm":
        raise Refusal(
            found=f"api_key_file of the deployment {name} with {engine}, which takes its key on the command line only",
            needed="an engine that takes it from its environment, so that no other user of the host reads it",
            change=f"`engine: vllm` for {name}, or a gateway in front of it that checks the key",
        )


def _check_gpus(name: str, gpus: Any) -> None:
    """The form of `gpus`; which GPUs the host has is a matter of `assign_gpus`."""
    indexes = gpus if isinstance(gpus, list) else []
    wrong = isinstance(gpus, str) and gpus != "all"
    wrong = wrong or any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in indexes)
    wrong = wrong or gpus == [] or len(set(map(str, indexes))) != len(indexes)
    if wrong:
        raise Refusal(
            found=f"gpus {gpus!r} of the deployment {name}",
            needed="all, a number of GPUs, or a list of different indexes such as [0, 1]",
            change=f"`gpus` of {name} in serving_deployments",
        )


def with_kept_starts(deployments: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[str]:
    """Names of the deployments for which it decides something what a host keeps of their starts (`Inputs.kept`).

    On GPUs that is what vLLM measured, and whether a release was proven.
    """
    if not facts.get("gpus"):
        return []
    return [item["name"] for item in deployments if item["engine"] == "vllm" or item.get("eager") == EAGER_FIRST]


def check_holders(deployments: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Refuse GPUs that an engine of a deployment which has left the inventory still holds.

    Raises:
        Refusal: naming that deployment.
    """
    names = {item["name"] for item in deployments}
    for holder in (facts.get("driver") or {}).get("holders") or []:
        if holder.get("deployment") and holder["deployment"] not in names:
            raise Refusal(
                found=f"the deployment {holder['deployment']}, which is not in the inventory, still holds GPUs "
                f"(process {holder.get('process')}, pid {holder.get('pid')})",
                needed="GPUs that no engine of another deployment holds",
                change=f"`systemctl disable --now vllm@{holder['deployment']}` (or sglang@) on it, or keep its entry",
            )


def check_ports(deployments: Sequence[Mapping[str, Any]], listening: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a port that somebody else listens on; the deployment's own engine may.

    Raises:
        Refusal: naming the port and who holds it.
    """
    for item in deployments:
        for socket in listening:
            address, own = str(socket["address"]), str(item["bind_address"])
            overlaps = address == own or address in _ANY_ADDRESS or own in _ANY_ADDRESS
            if socket["port"] != item["port"] or not overlaps or socket.get("deployment") == item["name"]:
                continue
            holder = f"process {socket.get('process') or 'unknown'} (pid {socket.get('pid') or 'unknown'})"
            if socket.get("deployment"):
                holder = f"the deployment {socket['deployment']}, {holder}"
            raise Refusal(
                found=f"port {item['port']} of the deployment {item['name']} is in use on {address} by {holder}",
                needed="a free port",
                change=f"`port` of {item['name']} in serving_deployments, or stop that process",
            )


def serving_releases(
    deployments: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], inputs: Inputs, *, check_host: bool = True
) -> list[dict[str, Any]]:
    """The releases of one host, each with what staging, activation and the gate need, as plain types.

    Args:
        deployments: `serving_deployments` of the host.
        facts: `ansible_facts['gpu_host']` of the host.
        inputs: the rest of the inventory.
        check_host: whether driver and container toolkit must already do what the releases need.

    Returns:
        One mapping a deployment: deployment, engine, release_id, files {name: text}, command, image {reference, digest,
        compressed_bytes}, model {key, revision, files, sources}, weights (the model and what it needs beside it, in the
        same form), port, url, health_route, metrics_route, served_names (those of adapters too), thinking, plan, notes.

    Raises:
        Refusal: for anything that would fail later, before anything has changed.
    """
    if not deployments:
        raise Refusal(
            found="a host in serving_hosts without deployments",
            needed="at least one entry in serving_deployments",
            change="serving_deployments of this host, or take it out of the group serving_hosts",
        )
    checked = normalize(deployments)
    known_models = catalogue.models(inputs.models)
    gpus = facts.get("gpus") or []
    if gpus:
        if check_host:
            require_software(facts)
        check_holders(checked, facts)
        assigned = assign_gpus(facts, checked)
        for item in checked:
            if item["gpus"] != "all":
                item["gpus"] = list(assigned[item["name"]])
    check_ports(checked, facts.get("listening") or [])
    return [_one(item, facts, inputs, known_models, check_host=check_host) for item in checked]


def engine_for(deployment: Mapping[str, Any], engines: Mapping[str, Any]) -> EngineInfo:
    """The engine of a deployment: its own version and image, else the inventory's, else the catalogue's pins."""
    pins = engines.get(deployment["engine"]) or {}
    version = deployment.get("engine_version") or pins.get("version")
    # The inventory's image belongs to the inventory's version.
    image = deployment.get("image") or (pins.get("image") if version == pins.get("version") else None)
    return engine_info(deployment["engine"], None if version is None else str(version), image)


def image_packages(deployment: Mapping[str, Any], engines: Mapping[str, Any]) -> dict[str, Any]:
    """The packages to be added to a deployment's image, as {packages, python}; empty where there are none.

    They belong to the inventory's image of the engine: a deployment with an image of its own has none.

    Raises:
        Refusal: a package without an exact version or without a hash.
    """
    pins = engines.get(deployment["engine"]) or {}
    packages = [] if deployment.get("image") else pins.get("packages") or []
    for package in packages:
        if not isinstance(package, str) or not _PACKAGE.fullmatch(" ".join(package.split())):
            raise Refusal(
                found=f"the package {package!r} of {deployment['engine']}",
                needed="an exact version and the hash of its wheel, such as `name==1.2.3 --hash=sha256:...`",
                change=f"serving_engines.{deployment['engine']}.packages; `pip hash` and `uv pip compile "
                "--generate-hashes` tell hashes",
            )
    return {"packages": list(packages), "python": str(pins.get("python") or IMAGE_PYTHON)} if packages else {}


def _one(
    item: Mapping[str, Any],
    facts: Mapping[str, Any],
    inputs: Inputs,
    known_models: Mapping[str, catalogue.Model],
    *,
    check_host: bool,
) -> dict[str, Any]:
    kept = inputs.kept.get(item["name"]) or {}
    if item["eager"] == EAGER_FIRST:
        item = {**item, "eager": not kept.get("proven")}
    engine = engine_for(item, inputs.engines)
    model = known_models.get(item["model"]) or catalogue.model(item["model"], inputs.models)
    if check_host and facts.get("gpus"):
        require_image(facts, engine, (inputs.lock.get("images") or {}).get(engine.image), item["environment"])
    locked_image = locked(inputs.lock, "images", engine.image, "no digest", "a digest beside the tag")
    weights = staged(model, inputs.lock, inputs.weight_sources)
    beside = [
        staged(other, inputs.lock, inputs.weight_sources, kind)
        for kind, other in needed_models(item, inputs.models)
        if kind != "model"
    ]
    lora = lora_of(item, inputs.lock, model, engine)
    draft = draft_of(item, inputs.models)
    item = {**item, "lora": lora, "draft": draft}
    driver = (facts.get("driver") or {}).get("loaded")
    repository, _, digest = split_image(engine.image, locked_image.get("digest"))
    check_signatures(engine.image, digest, locked_image.get("signatures") or [], inputs.image_keys)
    image = {
        "reference": engine.image,
        "digest": locked_image["digest"],
        "compressed_bytes": locked_image.get("compressed_bytes"),
    }
    runs, runs_digest = engine.image, digest
    packages = image_packages(item, inputs.engines)
    if packages:
        image |= packages
        runs = repository = DERIVED_REPOSITORY
        runs_digest = derived_digest(digest, packages["packages"])
    same: dict[str, Any] = {
        "model": model.key,
        "model_revision": weights.revision,
        "image": f"{repository}@{runs_digest}",
        "driver": driver,
        "arguments": _arguments_hash(item),
    }

    def build(records: Sequence[Record]) -> dict[str, Any]:
        plan = make_plan(
            model,
            facts,
            engine.engine,
            engine.version,
            item,
            measured=records,
            image=same["image"],
            adapters=lora.adapters if lora else None,
            draft=draft,
        )
        names = {row.get("index"): row.get("name") for row in facts.get("gpus") or ()}
        sizes = {
            **plan.as_dict(),
            "learned_from": [dict(record) for record in records],
            # What the host keeps a measurement of it under; None where nothing is estimated.
            "start": expected_start(
                plan,
                gpu_name=str(names.get(plan.gpus_used[0]) if plan.gpus_used else None),
                text_only=item["text_only"],
                speculative_tokens=item["speculative_tokens"],
                **same,
            ),
        }
        release: Release = build_release(
            item,
            engine,
            runs,
            runs_digest,
            {"key": model.key, **model.as_dict()},
            weights.revision,
            weights.manifest_sha256,
            sizes,
            driver,
            models_dir=inputs.models_dir,
            beside=[other.record() for other in beside],
        )
        return {"deployment": item["name"], "release_id": release.id, "files": release.files(), "plan": sizes}

    chosen = choose(build, read_kept(kept), same, relearn=inputs.relearn)
    host = "127.0.0.1" if item["bind_address"] in _ANY_ADDRESS else item["bind_address"]
    if ":" in host:
        host = f"[{host}]"
    _, reasoning = behaviour.wanted_parsers(item, model.as_dict())
    # Kept beside the release: going back to it must not need the inventory that asked for it.
    endpoint = {
        "engine": engine.engine,
        "unit": f"{engine.engine}@{item['name']}.service",
        "url": f"http://{host}:{item['port']}",
        "ready_route": engine.ready_route,
        "metrics_route": engine.metrics_route,
        "model": item["served_names"][0],
        "served_names": asked_names(item)[1:],
        "thinking": "absent" if reasoning is None else "off",
        "weights_bytes": sum(part.size_bytes for part in (weights, *beside)),
        "api_key_file": item["api_key_file"],
        "answers_alone": not (item["sglang"] or {}).get("disaggregation_mode"),
    }
    chosen["notes"] = [*chosen["notes"], *base_notes(item, lora, model)]
    return {
        **chosen,
        "engine": engine.engine,
        "engine_version": engine.version,
        "files": {**chosen["files"], "endpoint.json": json.dumps(endpoint, indent=2) + "\n"},
        "command": [*engine.entrypoint, *(word.format_map(CONTAINER_PATHS) for word in engine.arguments)],
        "image": image,
        "model": weights.as_dict(),
        "weights": [part.as_dict() for part in (weights, *beside)],
        "port": item["port"],
        "url": endpoint["url"],
        "health_route": endpoint["ready_route"],
        "metrics_route": endpoint["metrics_route"],
        "served_names": asked_names(item),
        "thinking": endpoint["thinking"],
        "api_key_file": endpoint["api_key_file"],
    }


def _arguments_hash(item: Mapping[str, Any]) -> str:
    """Of what a deployment gives to its engine beside sizes: a measurement under other arguments says nothing."""
    named = {name: item[name] for name in behaviour.FIELDS if item[name] is not None}
    given = {**named, **{name: item[name] for name in ("engine_args", "environment", "prefix_caching")}}
    if item.get("lora"):
        planned = item["lora"].adapters
        given["lora"] = [planned.rank, planned.slots, sorted(planned.modules or ())]
    if item["draft_model"]:
        given["draft_model"] = item["draft_model"]
    return hashlib.sha256(canonical_json(given).encode()).hexdigest()[:12]


def gate_endpoints(releases: Sequence[Mapping[str, Any]], root: str | None) -> list[dict[str, Any]]:
    """What the gate needs of each release.

    Args:
        releases: as `serving_releases` returns them.
        root: where releases lie on the host, to keep the result beside its release; None keeps nothing.
    """
    endpoints: list[dict[str, Any]] = []
    for release in releases:
        endpoint = {
            "name": release["deployment"],
            "url": release["url"],
            "model": release["served_names"][0],
            "served_names": list(release["served_names"][1:]),
            "engine": release["engine"],
            "thinking": release["thinking"],
        }
        if release.get("api_key_file"):
            endpoint["api_key_file"] = release["api_key_file"]
        if root is not None:
            endpoint["release_id"] = release["release_id"]
            endpoint["result_path"] = f"{root}/{release['deployment']}/releases/{release['release_id']}/gate.json"
        endpoints.append(endpoint)
    return endpoints


def plan_table(releases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The releases of a host as aligned lines for people."""
    rows = [("deployment", "model", "engine", "GPUs", "TP", "context", "sequences", "KV tokens", "release")]
    for release in releases:
        plan = release["plan"]
        rows.append(
            (
                release["deployment"],
                release["model"]["key"],
                f"{release['engine']} {release['engine_version']}",
                ",".join(str(index) for index in plan["gpus_used"]) or "CPU",
                str(plan["tensor_parallel_size"]),
                str(plan["max_model_len"]),
                str(plan["max_num_seqs"]),
                str(plan["kv_cache_tokens"]),
                release["release_id"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *(note for release in releases for note in release["notes"])]


def lock_requests(deployments: Sequence[Mapping[str, Any]], inputs: Inputs) -> dict[str, list[Any]]:
    """The images and models that deployments need locked.

    Returns:
        {images: [reference], models: [{key, revision, sources}]} without duplicates; `{revision}` stays in the sources.
        A LoRA adapter is such a model with `adapter: true`.

    Raises:
        Refusal: as for `normalize`, or an unknown model.
    """
    images: list[str] = []
    models: dict[str, dict[str, Any]] = {}
    for item in (_normalize_one(deployment) for deployment in deployments):
        reference = engine_for(item, inputs.engines).image
        if reference not in images:
            images.append(reference)
        for kind, model in needed_models(item, inputs.models):
            request = {
                "key": model.key,
                "revision": model.revision,
                "sources": weight_sources(model, "{revision}", inputs.weight_sources, for_lock=True),
                **({"adapter": True} if kind == "adapter" else {}),
            }
            if models.setdefault(model.key, request) != request:
                raise Refusal(
                    found=f"two adapters with the key {model.key} and different repositories or revisions",
                    needed="a `key` of its own for each: the lock has one entry for a key",
                    change="`key` of one of them in lora_adapters",
                )
    return {"images": images, "models": list(models.values())}
