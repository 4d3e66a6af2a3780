"""The manifest for KubeRay on the reference page has the fields of a `RayJob`, and a command that there is."""

import re
import shlex
from copy import deepcopy
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from forge.cli.main import command_named
from forge.cluster.options import ClusterOptions
from tests.cli.conftest import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with Ray")

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


CONTAINER = closed(
    "name image",
    name=TEXT,
    image=TEXT,
    resources=closed(limits=TEXTS, requests=TEXTS),
    ports={"type": "array", "items": closed("containerPort", name=TEXT, containerPort=NUMBER, protocol=TEXT)},
    env={"type": "array", "items": closed("name", name=TEXT, value=TEXT)},
)
POD = closed(
    "spec",
    metadata=closed(labels=TEXTS, annotations=TEXTS),
    spec=closed("containers", containers={"type": "array", "items": CONTAINER, "minItems": 1}),
)
WORKERS = closed(
    "groupName minReplicas maxReplicas template",
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    numOfHosts=NUMBER,
    idleTimeoutSeconds=NUMBER,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed("name", name=TEXT, labels=TEXTS),
    spec=closed(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        backoffLimit=NUMBER,
        activeDeadlineSeconds=NUMBER,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        submissionMode=TEXT,
        rayClusterSpec=closed(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=FLAG,
            authOptions=closed(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
            headGroupSpec=closed("template", rayStartParams=TEXTS, serviceType=TEXT, template=POD),
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)
"""The fields of `ray.io_rayjobs.yaml` (KubeRay, version v1) that a server needs, required ones included."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    page = (ROOT / "chapters/reference/server.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(apiVersion: ray\.io.*?)```", page, re.DOTALL)
    return yaml.safe_load(text)


def test_the_manifest_has_the_fields_of_its_schema(manifest):
    Draft202012Validator(RAY_JOB).validate(manifest)
    broken = deepcopy(manifest)
    del broken["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
    with pytest.raises(ValidationError, match="'maxReplicas' is a required property"):
        Draft202012Validator(RAY_JOB).validate(broken)


def test_the_manifest_runs_a_command_that_there_is_with_as_many_workers_as_it_needs(manifest):
    program, name, *words = shlex.split(manifest["spec"]["entrypoint"])
    given = dict(zip(words[::2], words[1::2], strict=True))
    known = {spelling for param in command_named(name).params for spelling in param.opts}
    assert program == "forge" and given.keys() <= known
    most = ClusterOptions(replicas=int(given["--replicas"]), max_replicas=int(given["--max-replicas"])).most
    (workers,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["maxReplicas"] == most + 1, "an update has one engine more"
    assert container["resources"]["limits"]["cpu"] == given["--threads"]
