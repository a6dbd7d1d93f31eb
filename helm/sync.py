# ruff: noqa: INP001 - a script
"""Update everything in the charts that is generated from other files: ``python helm/sync.py``.

It writes:

* the version in charts, Dockerfile, documents and examples, from pyproject.toml,
* the schema of ``kvbus.config``, from kvbus's own configuration model,
* the ``kvbus:`` section of the application chart's values and schema, and its copy of the library, from the library,
* the tables in both READMEs, from the values and their comments,
* the chart's copies of the Prometheus rules and the Grafana dashboards, from deploy/,
* the manifests in deploy/kubernetes, from the chart (this needs helm-python-sdk).
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ruamel.yaml import YAML

from kvbus.config.models import Config

ROOT: Final = Path(__file__).resolve().parents[1]
LIBRARY: Final = ROOT / "helm" / "kvbus-lib"
CHART: Final = ROOT / "helm" / "kvbus"
MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
COPIES: Final = {
    ROOT / "deploy" / "prometheus" / "kvbus.rules.yml": CHART / "files" / "kvbus.rules.yml",
    ROOT / "deploy" / "prometheus" / "kvbus-fleet.rules.yml": CHART / "files" / "kvbus-fleet.rules.yml",
    **{
        ROOT / "deploy" / "grafana" / f"{name}.json": CHART / "files" / f"{name}.json"
        for name in ("kvbus", "kvbus-sources-routers", "kvbus-internals")
    },
}
RENDERED: Final = {
    "simulation.yaml": ("demo", {}, "A simulated engine with kvbus, which needs no GPU and no model."),
    "aggregator.yaml": (
        "bus",
        {
            "mode": "deployment",
            "kvbus": {
                "config": {
                    "sources": [{"name": "engines", "discover": {"kubernetes": {"selector": "app=engine"}}}],
                }
            },
        },
        (
            "A kvbus in its own pod, which finds engines in other pods by their label. The engines bind the ports "
            "kv-events\n# and kv-replay of their pods.\n"
            "# The RoleBinding names kvbus's account in the namespace `default`. To use another namespace:\n"
            "#\n"
            "#   sed 's|namespace: default|namespace: NAMESPACE|' aggregator.yaml | kubectl apply -n NAMESPACE -f -\n"
            "#"
        ),
    ),
}
VERSION: Final = str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
"""The project's version. pyproject.toml is the only file in which it is written by hand."""

_OF_AN_IMAGE: Final = r"kvbus:"
_VERSIONED: Final = {
    LIBRARY / "Chart.yaml": (r"^version: ", r"^appVersion: "),
    LIBRARY / "README.md": (r"name: kvbus-lib, version: ",),
    LIBRARY / "templates" / "_check.tpl": (r"name: kvbus-lib, version: ",),
    LIBRARY / "templates" / "_sidecar.tpl": (r'image\.tag \| default "',),
    CHART / "Chart.yaml": (r"^version: ", r"^appVersion: ", r"^    version: "),
    CHART / "README.md": (_OF_AN_IMAGE,),
    ROOT / "Dockerfile": (r"^ARG VERSION=",),
    ROOT / "docs" / "KUBERNETES.md": (_OF_AN_IMAGE, r"newTag: "),
    MANIFESTS / "example" / "kustomization.yaml": (r"newTag: ",),
    MANIFESTS / "post-renderer" / "plugin.yaml": (r"^version: ",),
    ROOT / "tests" / "chart" / "data" / "other" / "Chart.yaml": (r"^    version: ",),
}
"""Files that contain the version, each with regular expressions for the text before the version."""
_NUMBER: Final = r"[0-9]+\.[0-9]+\.[0-9]+"
"""The form of a version that both pip and Helm accept."""

_BEGIN: Final = "<!-- values -->"
_END: Final = "<!-- /values -->"


def expected() -> dict[Path, str]:
    """Return the expected text of every file that this script generates, by path."""
    files = {path: current(path) for path in _VERSIONED}
    files |= library()
    for source in sorted(LIBRARY.rglob("*")):
        if source.is_file() and source.name != "README.md":
            files[CHART / "charts" / LIBRARY.name / source.relative_to(LIBRARY)] = files.get(source, read(source))
    files[CHART / "values.schema.json"] = chart_schema(files[LIBRARY / "values.schema.json"])
    files[CHART / "values.yaml"] = chart_values(read(LIBRARY / "values.yaml"))
    files[CHART / "README.md"] = with_table(files[CHART / "README.md"], files[CHART / "values.yaml"])
    files |= {target: read(source) for source, target in COPIES.items() if source.exists()}
    return files


def read(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8")


def current(path: Path) -> str:
    """Return the text of a file that contains the version, with the version of pyproject.toml.

    Raises:
        ValueError: The version is not where it used to be, or not of the form MAJOR.MINOR.PATCH.
    """
    if not re.fullmatch(_NUMBER, VERSION):
        raise ValueError(f"pyproject.toml: version {VERSION} must be MAJOR.MINOR.PATCH, which pip and Helm both take")
    text = read(path)
    for before in _VERSIONED[path]:
        text, found = re.subn(f"({before}){_NUMBER}", rf"\g<1>{VERSION}", text, flags=re.MULTILINE)
        if not found:
            raise ValueError(f"{path.relative_to(ROOT)}: no version after {before}")
    return text


def library() -> Iterator[tuple[Path, str]]:
    """Return the path and the expected text of each generated file in the library chart."""
    schema = json.loads(read(LIBRARY / "values.schema.json"))
    schema["definitions"] = {
        **{name: value for name, value in schema["definitions"].items() if not name.startswith("config")},
        **config_definitions(),
    }
    yield LIBRARY / "values.schema.json", json.dumps(schema, indent=2) + "\n"
    yield LIBRARY / "README.md", with_table(current(LIBRARY / "README.md"), read(LIBRARY / "values.yaml"))


def config_definitions() -> dict[str, Any]:
    """Return the JSON Schema of kvbus.yaml, as definitions of a draft-07 schema."""
    schema = Config.model_json_schema()
    named = {f"config{name}": value for name, value in schema.pop("$defs").items()}
    return {name: _plain(value) for name, value in sorted({"config": schema, **named}.items())}


_WITHOUT: Final = frozenset({"title", "unit", "default", "default_text", "examples"})
_UNTYPED: Final = {
    "block_size": {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]},
    "replay_framing": {"enum": ["auto", 3, 4]},
}
"""Schemas of the keys whose type pydantic cannot derive."""


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            out[key] = {name: {**_typed(field), **_UNTYPED.get(name, {})} for name, field in value.items()}
        elif key == "$ref":
            out[key] = value.replace("#/$defs/", "#/definitions/config")
        elif key not in _WITHOUT:
            out[key] = _plain(value)
    return out


def _typed(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one key. A number of bytes may also be text such as 64MiB."""
    plain: dict[str, Any] = _plain(field)
    if field.get("unit") != "bytes":
        return plain
    number = {name: plain.pop(name) for name in ("type", "minimum", "maximum") if name in plain}
    return {**plain, "anyOf": [number, {"type": "string", "pattern": "^[0-9.]+ ?([kKmMgGtT][iI]?)?[bB]?$"}]}


def chart_schema(library_schema: str) -> str:
    """Return the application chart's schema, with the library's schema for its ``kvbus:`` section.

    Helm also checks that section against the library's own schema. But editors and other tools see only the application
    chart's schema.
    """
    text = library_schema.replace('"#/definitions/', '"#/definitions/kvbus.')
    section = json.loads(text)
    definitions = {f"kvbus.{name}": value for name, value in section.pop("definitions").items()}
    for key in ("$schema", "title"):
        del section[key]
    schema = json.loads(read(CHART / "values.schema.json"))
    schema["properties"]["kvbus"] = section
    own = {name: value for name, value in schema["definitions"].items() if not name.startswith("kvbus.")}
    schema["definitions"] = {**own, **definitions}
    return json.dumps(schema, indent=2) + "\n"


def chart_values(library_values: str) -> str:
    """Return the application chart's values, with the library's values as their ``kvbus:`` section."""
    section = library_values.replace("configFrom: environment\n", "configFrom: configMap\n")
    lines = [f"  {line}" if line else "" for line in section.splitlines()]
    made = "\n".join(["kvbus:", *lines, ""])
    return _SECTION.sub(lambda _: made, read(CHART / "values.yaml"), count=1)


_SECTION: Final = re.compile(r"^kvbus:\n(?:(?:  .*)?\n)*?(?=\n?^\S)", re.MULTILINE)


def with_table(readme: str, values: str) -> str:
    """Return a README with the current table of values."""
    before, rest = readme.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    rows = ["| value | default | |", "|---|---|---|"]
    rows += [f"| `{key}` | {default} | {about} |" for key, default, about in described(values)]
    return before + "\n".join([_BEGIN, *rows, _END]) + after


def described(values: str) -> Iterator[tuple[str, str, str]]:
    """Return key path, default and comment of every value with a ``# --`` comment.

    Raises:
        ValueError: A value has no comment, or both a section and its keys have one.
    """
    defaults = YAML(typ="safe", pure=True).load(values)
    path: list[tuple[int, str]] = []
    about: list[str] = []
    covered: int | None = None
    for line in values.splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.startswith("# -- "):
            about = [text.removeprefix("# -- ")]
        elif text.startswith("#"):
            about += [text.removeprefix("#").strip()] if about else []
        elif not text:
            about = []
        elif covered is None or indent <= covered:
            covered = None
            key = text.split(":", 1)[0]
            path = [*(item for item in path if item[0] < indent), (indent, key)]
            names = [name for _, name in path]
            value = defaults
            for name in names:
                value = value[name]
            if about:
                yield ".".join(names), f"`{json.dumps(value)}`".replace("|", "\\|"), " ".join(about).replace("|", "\\|")
                covered, about = indent, []
            elif not text.endswith(":"):
                raise ValueError(f"{'.'.join(names)} has no comment that begins with `# --`")


def manifests() -> dict[Path, str]:
    """Return the text of every file in deploy/kubernetes that is rendered from the chart, by path."""
    files = {MANIFESTS / name: _rendered(*how) for name, how in RENDERED.items()}
    component = _sibling("component")
    for name, text in component.components(_worker, dump).items():
        files[MANIFESTS / "component" / name] = _NOTICE + text
    values = MANIFESTS / "platforms" / "llm-d" / "modelservice-values.yaml"
    files[values] = _NOTICE + component.modelservice(_worker, dump)
    files[MANIFESTS / "inject" / "kserve.yaml"] = _kserve()
    files[MANIFESTS / "inject" / "policy.yaml"] = _NOTICE + _sibling("policy").policy(_worker)
    return files


def _sibling(name: str) -> ModuleType:
    """Import another script of this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ValueError(f"helm/{name}.py does not exist")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _worker(kvbus: Mapping[str, Any]) -> str:
    return render({"kvbus": {"model": "model", **kvbus}})["kvbus/templates/workload.yaml"]


_NOTICE: Final = "# Rendered from helm/kvbus by `python helm/sync.py`; change it there.\n"
_OF_HELM: Final = re.compile(
    r"^ *(?:helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: Helm)\n|^# Source: .*\n", re.MULTILINE
)


def _rendered(release: str, values: dict[str, Any], about: str) -> str:
    texts = sorted(render(values, release).items())
    documents = [_OF_HELM.sub("", text).strip() for name, text in texts if re.search(r"templates/[\w-]+\.yaml$", name)]
    whole = "".join(f"---\n{text}\n" for text in documents if text)
    return f"# {about}\n{_NOTICE}{whole}"


def render(values: dict[str, Any], release: str = "demo", namespace: str = "default") -> dict[str, str]:
    """Return the rendered text of each of the chart's templates, by the template's name."""
    import helm_python  # noqa: PLC0415 - everything else here works without it

    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        return chart.render(values, name=release, namespace=namespace)


_OF_THE_RELEASE: Final = "app.kubernetes.io/"


_KSERVE: Final = """\
# An LLMInferenceServiceConfig of KServe. An LLMInferenceService includes it with `baseRefs: [{name: kvbus}]`. It has
# the preset for llm-d, with the ports at which llm-d's router looks. KServe fills in the model's name.
"""


def _kserve() -> str:
    """Return the sidecar as a config that KServe's services can include by name."""
    values = {"router": "llm-d", "configFrom": "environment"}
    template = YAML(typ="safe", pure=True).load(_worker(values))["spec"]["template"]
    pod = template["spec"]
    labels = {
        name: value for name, value in template["metadata"]["labels"].items() if not name.startswith(_OF_THE_RELEASE)
    }
    volumes = [volume for volume in pod["volumes"] if volume["name"].startswith("kvbus-")]
    (sidecar,) = pod["initContainers"]
    (sources,) = (json.loads(each["value"]) for each in sidecar["env"] if each["name"] == "KVBUS_SOURCES")
    where = {key: sources[0][key] for key in ("endpoint", "replay_endpoint")}
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **where, "topic": ""})
    named = json.loads(json.dumps(sidecar))
    for variable in named["env"]:
        if variable["name"] == "KVBUS_MODEL":
            variable["value"] = "{{ .Spec.Model.Name }}"
    kserve = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceServiceConfig",
        "metadata": {"name": "kvbus"},
        "spec": {
            "labels": labels,
            "template": {
                "initContainers": [named],
                "containers": [{"name": "main", "args": ["--enable-prefix-caching", "--kv-events-config", events]}],
                "volumes": volumes,
            },
        },
    }
    return _KSERVE + _NOTICE + dump(kserve)


def dump(document: Any) -> str:
    """Return a document as YAML in block style."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 200
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    buffer = io.StringIO()
    yaml.dump(document, buffer)
    return buffer.getvalue()


def main() -> int:
    """Write the files that differ from the expected text."""
    files = expected()
    for path in (CHART / "charts" / LIBRARY.name).rglob("*"):
        if path.is_file() and path not in files:
            path.unlink()
    _write(files)
    if importlib.util.find_spec("helm_python") is None:
        sys.stderr.write("helm-python-sdk is not installed: deploy/kubernetes is left as it is\n")
    else:
        _write(manifests())  # the chart's files, from which these are rendered, are already up to date
    return 0


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        if not path.exists() or read(path) != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    sys.exit(main())
