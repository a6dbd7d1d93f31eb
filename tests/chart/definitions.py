"""Read the custom resource definitions of other projects as strict JSON Schemas, which refuse undefined fields."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

PLATFORMS: Final = os.environ.get("TEST_PLATFORMS_HOME")
needs_platforms = pytest.mark.skipif(PLATFORMS is None, reason="TEST_PLATFORMS_HOME is not set (make platforms)")


def strict(node: Any) -> Any:
    """Return a structural schema as a JSON Schema that refuses unknown fields, as a strict API server does."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {
        key: {name: strict(each) for name, each in value.items()} if key == "properties" else strict(value)
        for key, value in node.items()
        if key != "format"
    }
    if "properties" in out and not out.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


@functools.cache
def definition(kind: str, version: str) -> Any:
    """Return the strict schema of a kind of custom resource. The results are cached, because the files are large."""
    (path,) = Path(PLATFORMS or "", "crds").glob(f"*_{kind.lower()}s.yaml")
    crd = YAML(typ="safe").load(path.read_text())["spec"]
    (schema,) = (
        one["schema"]["openAPIV3Schema"] for one in crd["versions"] if f"{crd['group']}/{one['name']}" == version
    )
    known = strict(schema)
    known["properties"]["metadata"] = {"type": "object"}
    return known


def mistakes(each: Any) -> list[str]:
    """Return the error messages for a custom resource that does not fit the schema of its kind."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    known = definition(each["kind"], each["apiVersion"])
    return [error.message for error in jsonschema.Draft202012Validator(known).iter_errors(each)]
