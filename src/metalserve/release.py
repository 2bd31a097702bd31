"""The release: the immutable record of exactly what one deployment runs, named by a hash of its content."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metalserve.engines.config import engine_config
from metalserve.engines.environment import check_line_value, engine_environment
from metalserve.engines.info import EngineInfo
from metalserve.engines.lora import CONTAINER_DIRECTORY, command_words
from metalserve.engines.rendering import render_config
from metalserve.errors import Refusal
from metalserve.remote.release_list import diff_contents

SCHEMA = 1
MODELS_DIRECTORY = "/var/lib/metalserve/models"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
# A repository as docker takes it: registry[:port]/path, lower case.
_REPOSITORY = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
# Where the container has them, by kind.
_MOUNT_POINTS = {"adapter": CONTAINER_DIRECTORY, "draft": "/models"}
_LOCK = "run playbooks/ops/lock.yml, which asks the registry for the digest and writes it down"


@dataclass(frozen=True)
class Release:
    """One deployment's content: image, weights, engine configuration, environment, plan and driver.

    ``image`` is repository@digest, ``image_tag`` the tag it was resolved from (for people). ``devices`` are CDI
    names, empty on a CPU host. ``driver`` is the driver version it was planned for, None on a CPU host.
    """

    deployment: str
    engine: str
    engine_version: str
    image: str
    image_tag: str | None
    model: str
    model_revision: str
    manifest_sha256: str
    port: int
    devices: tuple[str, ...]
    models_dir: str
    config: Mapping[str, Any]
    environment: Mapping[str, str]
    plan: Mapping[str, Any]
    driver: str | None
    beside: tuple[Mapping[str, str], ...] = ()
    """What is mounted beside the model: kind, key, revision and manifest_sha256 of each."""
    words: tuple[str, ...] = ()
    """What stands on the engine's command line, because its file cannot say it."""

    def content(self) -> dict[str, Any]:
        """Everything the release records, as plain types; what a deployment does not have is left out."""
        known = {"schema": SCHEMA, **asdict(self), "devices": list(self.devices)}
        for name in ("beside", "words"):
            known[name] = list(known[name])
            if not known[name]:
                del known[name]
        return known

    @property
    def id(self) -> str:
        """First 12 hexadecimal digits of the SHA-256 of what runs, as canonical JSON.

        The plan is recorded but not hashed: what it decided is in the configuration, and a reworded reason must not
        restart a fleet.
        """
        runs = {name: value for name, value in self.content().items() if name != "plan"}
        return hashlib.sha256(canonical_json(runs).encode()).hexdigest()[:12]

    @property
    def model_directory(self) -> str:
        """Where the weights lie on the host."""
        return f"{self.models_dir}/{self.model}/{self.model_revision}"

    def files(self) -> dict[str, str]:
        """The three files of the release, name -> text."""
        record = json.dumps({"id": self.id, **self.content()}, indent=2, sort_keys=True, ensure_ascii=False)
        return {
            "release.json": record + "\n",
            "engine.yaml": render_config(self.engine, self.config),
            "release.env": self._environment_file(),
        }

    def _environment_file(self) -> str:
        """Read by systemd (EnvironmentFile=) for the unit and by docker (--env-file) for the container."""
        lines = {
            "METALSERVE_RELEASE": self.id,
            "METALSERVE_IMAGE": self.image,
            "METALSERVE_DEVICES": " ".join(f"--device {device}" for device in self.devices),
            "METALSERVE_MODEL_DIR": self.model_directory,
            "METALSERVE_MODEL_KEY": self.model,
            "METALSERVE_PORT": str(self.port),
            **({"METALSERVE_MOUNTS": " ".join(self._mounts())} if self.beside else {}),
            **({"METALSERVE_WORDS": " ".join(self.words)} if self.words else {}),
            **self.environment,
        }
        return "".join(f"{name}={check_line_value(name, value)}\n" for name, value in lines.items())

    def _mounts(self) -> Iterator[str]:
        """Arguments of `docker run`, one word each."""
        for part in self.beside:
            source = f"{self.models_dir}/{part['key']}/{part['revision']}"
            yield f"--mount=type=bind,source={source},target={_MOUNT_POINTS[part['kind']]}/{part['key']},readonly"


def canonical_json(content: object) -> str:
    """JSON with sorted keys and no white space: equal content gives equal text.

    Raises:
        ValueError: a number that JSON does not know (NaN, infinity).

    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def split_image(reference: str, digest: str | None) -> tuple[str, str | None, str]:
    """Repository, tag and digest of an image.

    Args:
        reference: ``repository[:tag][@digest]``.
        digest: ``sha256:`` and 64 hexadecimal digits; may be None when the reference carries it.

    Raises:
        Refusal: no digest, a malformed one, or two that differ.

    """
    name, _, inner = reference.partition("@")
    repository, tag = name, None
    if ":" in name.rsplit("/", 1)[-1]:
        repository, tag = name.rsplit(":", 1)
    chosen = digest or inner
    if not chosen:
        raise Refusal(
            found=f"the image {reference} without a digest",
            needed="sha256: and 64 hexadecimal digits, so that every host runs the same image",
            change=_LOCK,
        )
    if _DIGEST.fullmatch(chosen) is None:
        raise Refusal(
            found=f"'{chosen}' as the digest of the image {reference}",
            needed="sha256: and 64 hexadecimal digits in lower case",
            change=_LOCK,
        )
    if digest and inner and digest != inner:
        raise Refusal(
            found=f"the image {reference} with another digest in the lock, {digest}",
            needed="the same digest in both",
            change=f"remove the digest from image of the deployment, or {_LOCK}",
        )
    if _REPOSITORY.fullmatch(repository) is None:
        raise Refusal(
            found=f"'{reference}' as an image",
            needed="repository:tag, such as vllm/vllm-openai:v0.33.0",
            change="image of the deployment",
        )
    return repository, tag, chosen


def cdi_devices(deployment: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[str, ...]:
    """CDI names of the GPUs of a deployment; the plan's own choice wins over ``gpus``. Empty on a CPU host."""
    if plan["device"] == "cpu":
        return ()
    gpus = plan.get("gpus_used")
    if gpus is None:
        gpus = deployment.get("gpus", "all")
    if gpus == "all":
        return ("nvidia.com/gpu=all",)
    if not gpus or isinstance(gpus, str) or len(set(gpus)) != len(gpus):
        raise Refusal(
            found=f"gpus {gpus!r} of the deployment {deployment['name']}",
            needed="all, or a list of different GPU indexes such as [0, 1]",
            change="gpus of the deployment",
        )
    return tuple(f"nvidia.com/gpu={int(index)}" for index in gpus)


def build_release(
    deployment: Mapping[str, Any],
    engine_info: EngineInfo,
    image_reference: str,
    image_digest: str | None,
    model: Mapping[str, Any],
    model_revision: str,
    manifest_sha256: str,
    plan: Mapping[str, Any],
    driver: str | None,
    models_dir: str = MODELS_DIRECTORY,
    beside: Sequence[Mapping[str, str]] = (),
) -> Release:
    """The release of a deployment on a host.

    Args:
        deployment: an item of ``serving_deployments``.
        engine_info: facts of its engine; its version decides, also over ``engine_version``.
        image_reference: image with tag, from the deployment or the catalogue.
        image_digest: the digest the lock holds for it.
        model: catalogue entry with its ``key``.
        model_revision: commit of the weights' repository, a directory name.
        manifest_sha256: SHA-256 of the weights' manifest, 64 hexadecimal digits.
        plan: sizes of the deployment on this host (see ``engine_config``).
        driver: NVIDIA driver version of the host, None without one.
        models_dir: absolute directory on the host that holds ``<model>/<revision>``.
        beside: kind, key, revision and manifest_sha256 of what is mounted beside the model.

    Raises:
        Refusal: an image without a good digest, weights without a revision or manifest, a model other than the
            deployment's, or anything ``engine_config`` and ``engine_environment`` refuse.

    """
    repository, tag, digest = split_image(image_reference, image_digest)
    if model["key"] != deployment["model"]:
        raise Refusal(
            found=f"the catalogue entry {model['key']} for the deployment {deployment['name']}",
            needed=f"the entry of its own model, {deployment['model']}",
            change="model of the deployment",
        )
    if not model_revision or _REVISION.fullmatch(model_revision) is None:
        raise Refusal(
            found=f"'{model_revision}' as the revision of {model['key']}",
            needed="a commit of its repository, so that every host serves the same weights",
            change=f"run playbooks/ops/lock.yml, or set revision of the model {model['key']}",
        )
    if _SHA256.fullmatch(manifest_sha256 or "") is None:
        raise Refusal(
            found=f"'{manifest_sha256}' as the hash of the manifest of {model['key']}",
            needed="64 hexadecimal digits of a SHA-256 in lower case",
            change="run playbooks/ops/lock.yml, which reads the files and writes their manifest",
        )
    return Release(
        deployment=deployment["name"],
        engine=engine_info.engine,
        engine_version=engine_info.version,
        image=f"{repository}@{digest}",
        image_tag=tag,
        model=model["key"],
        model_revision=model_revision,
        manifest_sha256=manifest_sha256,
        port=int(deployment["port"]),
        devices=cdi_devices(deployment, plan),
        models_dir=models_dir.rstrip("/"),
        config=engine_config(deployment, model, plan, engine_info),
        environment=engine_environment(deployment, plan) | key_file_variable(deployment),
        plan=json.loads(canonical_json(plan)),
        driver=driver,
        beside=tuple(dict(part) for part in beside),
        words=command_words(deployment),
    )


def key_file_variable(deployment: Mapping[str, Any]) -> dict[str, str]:
    """Where the host keeps the API key of a deployment: a path, so that the release holds no secret."""
    path = deployment.get("api_key_file")
    return {"METALSERVE_API_KEY_FILE": path} if path else {}


def read_release(text: str) -> Release:
    """A release from the text of its release.json.

    Raises:
        Refusal: another schema, or a content that does not hash to the id it carries.

    """
    record = json.loads(text)
    claimed, schema = record.pop("id", None), record.pop("schema", None)
    if schema != SCHEMA:
        raise Refusal(
            found=f"a release.json of schema {schema}",
            needed=f"schema {SCHEMA}",
            change="activate a release that this version of metalserve wrote",
        )
    listed = {name: tuple(record[name]) for name in ("devices", "beside", "words") if name in record}
    release = Release(**{**record, **listed})
    if release.id != claimed:
        raise Refusal(
            found=f"a release.json that says {claimed}, with a content of {release.id}",
            needed="an unchanged record",
            change="run playbooks/rollout.yml, which writes the release again",
        )
    return release


def diff_releases(a: Release, b: Release) -> list[str]:
    """What changes from release ``a`` to release ``b``, one line for each value; see ``diff_contents``."""
    return diff_contents(a.content(), b.content())
