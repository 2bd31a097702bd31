"""What a deployment needs on its host's disk: the model and what goes beside it, as the lock names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from metalserve import catalogue
from metalserve.adapters import adapter_entry
from metalserve.errors import Refusal
from metalserve.hubs import NAMES as HUB_NAMES
from metalserve.hubs import hub_files_url
from metalserve.planner import Draft, read_draft
from metalserve.planner.draft import EAGLE3
from metalserve.remote.weights_content import HEAD
from metalserve.remote.weights_manifest import WeightsError, manifest_sha256

# A word is the hub of that name, with the model's own repository there.
DEFAULT_SOURCES = ("huggingface",)


@dataclass(frozen=True)
class Staged:
    """One directory of proven files. ``kind`` is model, adapter or draft."""

    kind: str
    key: str
    revision: str
    manifest_sha256: str
    weight_format: str
    files: tuple[Mapping[str, Any], ...]
    sources: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(int(entry["size_bytes"]) for entry in self.files)

    def as_dict(self) -> dict[str, Any]:
        """What the role model_weights needs, as plain types."""
        return {
            "key": self.key,
            "revision": self.revision,
            "files": [dict(entry) for entry in self.files],
            "weight_format": self.weight_format,
            "sources": list(self.sources),
        }

    def record(self) -> dict[str, str]:
        """What a release says of it."""
        names = ("kind", "key", "revision", "manifest_sha256")
        return {name: str(getattr(self, name)) for name in names}


def draft_of(item: Mapping[str, Any], models: Mapping[str, Any]) -> Draft | None:
    """The draft model of a deployment as the planner needs it; ``models`` are the inventory's own.

    Raises:
        Refusal: an unknown model, the deployment's own, or one that cannot draft.
    """
    key = item["draft_model"]
    if key is None:
        return None
    if key == item["model"]:
        raise Refusal(
            found=f"draft_model {key} of the deployment {item['name']}, which is its model",
            needed="a smaller model, or an EAGLE-3 head; the model's own MTP layers need none",
            change=f"`draft_model` of {item['name']} in serving_deployments",
        )
    return read_draft(key, catalogue.model(key, models).shape)


def needed_models(item: Mapping[str, Any], models: Mapping[str, Any]) -> list[tuple[str, catalogue.Model]]:
    """(kind, model) of a deployment: its model, its draft model, and its adapters in the form of a model.

    ``models`` are the inventory's own. A head of EAGLE-3 has a format of its own, for it has no tokenizer.

    Raises:
        Refusal: an unknown model, a draft model that cannot be one, or an adapter with the key of a model.
    """
    model = catalogue.model(item["model"], models)
    known = catalogue.models(models)
    adapters = [adapter_entry(entry) for entry in item["lora_adapters"]]
    for adapter in adapters:
        if adapter.key in known:
            raise Refusal(
                found=f"the key {adapter.key} of an adapter of {item['name']}, which is a model's",
                needed="a key of its own: it names the directory on the host and the entry of the lock",
                change=f"`key` of that adapter in lora_adapters of {item['name']}",
            )
    found = [("model", model)]
    draft = draft_of(item, models)
    if draft is not None:
        entry = catalogue.model(draft.key, models)
        found.append(("draft", replace(entry, format=f"{HEAD}{entry.format}") if draft.method == EAGLE3 else entry))
    return [*found, *(("adapter", adapter) for adapter in adapters)]


def staged(
    model: catalogue.Model, lock: Mapping[str, Any], sources: Mapping[str, Sequence[str]], kind: str = "model"
) -> Staged:
    """The files of a model or of what goes beside it, by the lock.

    Raises:
        Refusal: it is not locked, the lock is not whole or names another revision, or there is no place for it.
    """
    what = f"the {'adapter' if kind == 'adapter' else 'model'} {model.key}"
    entry = locked(lock, "models", model.key, "no revision and manifest", "a commit and file hashes")
    try:
        manifest = manifest_sha256(entry["files"])
        revision = str(entry["revision"])
    except KeyError as error:
        raise Refusal(
            found=f"a lock of {what} without {error.args[0]}",
            needed="revision and files",
            change="remove the entry from the lock and run playbooks/ops/lock.yml",
        ) from error
    except WeightsError as error:
        raise Refusal(
            found=f"the lock of {what}: {error}",
            needed="its manifest",
            change="run playbooks/ops/lock.yml",
        ) from error
    return Staged(
        kind=kind,
        key=model.key,
        revision=revision,
        manifest_sha256=manifest,
        weight_format=model.format,
        files=tuple(entry["files"]),
        sources=tuple(weight_sources(model, revision, sources, entry.get("hub_revisions") or {})),
    )


def locked(lock: Mapping[str, Any], kind: str, key: str, found: str, needed: str) -> Mapping[str, Any]:
    """An entry of the lock; ``kind`` is images or models.

    Raises:
        Refusal: there is none, with the words of ``found`` and ``needed``.
    """
    entry = (lock.get(kind) or {}).get(key)
    if not isinstance(entry, Mapping):
        raise Refusal(
            found=f"{found} locked for {key}",
            needed=f"{needed}, so that every host runs the same bytes",
            change="run `ansible-playbook playbooks/ops/lock.yml` with this inventory; it writes them down once",
        )
    return entry


def weight_sources(
    model: catalogue.Model,
    revision: str,
    sources: Mapping[str, Sequence[str]],
    hub_revisions: Mapping[str, str] | None = None,
    *,
    for_lock: bool = False,
) -> list[str]:
    """The places of a model's files, with the names filled in; a place that needs an unknown name is left out.

    The words `huggingface` and `modelscope` become the address of the model's files there, at the hub's own locked
    revision. For the lock itself they become `HUB:REPOSITORY`.

    Raises:
        Refusal: no place is left.
    """
    names = {"revision": revision, "key": model.key, **model.repositories}
    templates = sources.get(model.key) or sources.get("default") or DEFAULT_SOURCES
    if isinstance(templates, str) or not all(isinstance(template, str) for template in templates):
        raise Refusal(
            found=f"serving_weight_sources.{model.key} {templates!r}",
            needed="a list of URLs, directories, huggingface or modelscope",
            change=f"serving_weight_sources.{model.key}",
        )
    filled = []
    for template in templates:
        if template in HUB_NAMES:
            repository = model.repositories.get(template)
            if repository is not None:
                commit = (hub_revisions or {}).get(template, revision)
                filled.append(f"{template}:{repository}" if for_lock else hub_files_url(template, repository, commit))
            continue
        try:
            used = {name for _, name, _, _ in Formatter().parse(template) if name}
            if all(names[name] is not None for name in used):
                filled.append(template.format_map(names))
        except (KeyError, ValueError) as error:
            raise Refusal(
                found=f"the place {template!r} of {model.key} names {error}",
                needed=f"only {', '.join('{' + name + '}' for name in names)}",
                change=f"serving_weight_sources.{model.key}",
            ) from error
    if not filled:
        raise Refusal(
            found=f"no place to fetch {model.key} from",
            needed="a repository in its catalogue entry, or a URL or directory",
            change=f"serving_weight_sources.{model.key}",
        )
    return filled
