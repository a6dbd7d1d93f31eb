"""Create a service account in the tests' cluster with the rights that kvbus's chart gives it."""

from __future__ import annotations

from typing import Any

from tests.chart.charts import render
from tests.cluster.api import Api, placed

RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRoleBinding")


def account_of(api: Api, namespace: str, values: dict[str, Any]) -> str:
    """Apply the objects of a release that concern rights, and return the name of its service account."""
    release = render(values, namespace=namespace)
    for kind in RIGHTS:
        for each in release.all(kind):
            api.apply(placed(each, namespace))
    return str(release.pod["spec"]["serviceAccountName"])
