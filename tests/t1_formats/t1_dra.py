"""What the DRA driver reads and writes: quantities, parameters, allocations, devices, CDI files, slices, manifests."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import syslog
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from backend.core.settings import HIGH, LOW, MAX, PERIOD, PRIORITY, QUOTA, SETTINGS, SM_MAX, WEIGHT
from ggroupfs.dra import NAME, cdi, hook, parameters, quantities, slices
from ggroupfs.dra.claims import granted
from ggroupfs.dra.devices import Device, published
from ggroupfs.dra.parameters import Asked, Refused
from ggroupfs.dra.store import Claim, Grants, Share, Store
from tests.support.kubernetes import schema

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGING = ROOT / "packaging" / "kubernetes"
GIB = 1 << 30
UID = "0b5bd9e8-6b9b-4f0a-9bb8-0c5a3d1f4e2a"
ENFORCED = {one.control: "enforced" for one in SETTINGS if one.control is not None}


def device(index: int = 0, memory: int = 80 * GIB, present: bool = True, **controls: str) -> Device:
    return Device(f"gpu-{index}", f"GPU-{index}", index, "NVIDIA H100", memory, present, controls or ENFORCED)


# Quantities


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("20Gi", 20 << 30), ("500M", 500_000_000), ("1.5Gi", 3 << 29), ("1e3", 1000), ("100m", 1), ("1500m", 2)],
)
def test_quantities(text: str, number: int) -> None:
    assert quantities.whole(text) == number


@pytest.mark.parametrize("text", ["", "-1", "20 Gi", "20GB", "Gi", "0x10", "1e", "9Ei9", "8Ei", "٣"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a quantity|too large"):
        quantities.whole(text)


@pytest.mark.parametrize("number", [0, 1, 1 << 20, (1 << 30) + 1, 20 << 30, 3 << 40])
def test_a_quantity_that_is_written_is_read_again(number: int) -> None:
    assert quantities.whole(quantities.text(number)) == number


# Parameters


def asked(by_class: bool = False, **values: Any) -> Asked:
    whole = {"apiVersion": parameters.API_VERSION, "kind": parameters.KIND, **values}
    return parameters.read(whole, 4 * GIB, by_class)


def test_names_and_ranges_are_those_of_the_settings() -> None:
    assert set(parameters.ASKED.values()) == {one for one in SETTINGS if one.environment} - {HIGH, SM_MAX} | {QUOTA}
    assert set(parameters.ASKED) == {"weight", "priority", "low", "max", "quota", "swapMax"}
    for name, setting in parameters.ASKED.items():
        most = "max" if setting.most == MAX else setting.most
        assert asked(by_class=True, **{name: most}).values[setting.field] == setting.most
        for value in (setting.most + 1, setting.least - 1, "x", [], None, 1.5, True):
            with pytest.raises(Refused, match=f"parameters.{name}"):
                asked(**{name: value})


def test_the_last_that_is_said_counts_and_a_class_may_say_more() -> None:
    by_class, by_claim = asked(by_class=True, priority=2, weight=900), asked(priority=4, weight=800)
    assert parameters.settled(GIB, 500, [by_class, by_claim]) == {"high": GIB, "weight": 800, "priority": 4}
    for beyond in (asked(weight=901), asked(priority=1)):
        with pytest.raises(Refused):
            parameters.settled(GIB, 500, [by_class, beyond])
    with pytest.raises(Refused, match="share of 100"):
        parameters.settled(GIB, None, [asked(weight=101)])


def test_protection_is_of_what_the_claim_has() -> None:
    assert parameters.settled(4 * GIB, 100, [asked(low="50%")])[LOW.field] == 2 * GIB
    assert parameters.settled(4 * GIB, 100, [asked(low="max")])[LOW.field] == 4 * GIB
    with pytest.raises(Refused, match="the claim has"):
        parameters.settled(4 * GIB, 100, [asked(low="5Gi")])


@pytest.mark.parametrize(
    ("value", "us", "period_us"),
    [("30%", 30_000, 100_000), ("150% 20ms", 30_000, 20_000), ("max", MAX, 100_000), ("infinity", MAX, 100_000)],
)
def test_a_quota_is_a_part_of_the_time(value: str, us: int, period_us: int) -> None:
    assert asked(quota=value).values == {"quota_us": us, "period_us": period_us}


@pytest.mark.parametrize("value", ["30", "0.1%", "30% 2s", "30% 1ms", "-1%", 30])
def test_what_is_no_quota(value: Any) -> None:
    with pytest.raises(Refused, match=f"parameters.quota: {value}"):
        asked(quota=value)


@pytest.mark.parametrize(
    ("name", "said", "less", "more"),
    [
        ("max", "2Gi", "1Gi", "3Gi"),
        ("max", "50%", "2Gi", "max"),
        ("swapMax", "1Gi", 0, "max"),
        ("quota", "30%", "30% 20ms", "31% 20ms"),
        ("quota", "30% 20ms", "10%", "infinity"),
    ],
)
def test_what_a_class_limits_a_claim_may_limit_further(name: str, said: str, less: Any, more: str) -> None:
    by_class = asked(by_class=True, **{name: said})
    field = parameters.ASKED[name].field
    lower = asked(**{name: less})
    assert parameters.settled(GIB, 100, [by_class, lower])[field] == lower.values[field]
    with pytest.raises(Refused, match=rf"parameters.{name}: more than the .* of the DeviceClass"):
        parameters.settled(GIB, 100, [by_class, lower, asked(**{name: more})])
    assert parameters.settled(GIB, 100, [asked(**{name: more})])[field] == asked(**{name: more}).values[field]


def test_quotas_of_several_shares_are_parts_of_the_time_together() -> None:
    shares = [asked(quota=value).values for value in ("30%", "50% 20ms", "5% 1s")]
    assert parameters.together(shares) == {"quota_us": 850_000, "period_us": 1_000_000}
    assert parameters.together([*shares, {}]) == {"quota_us": MAX, "period_us": 100_000}


def test_every_parameter_has_a_rule_for_several_shares() -> None:
    one = {"high": 1, "weight": 9000, "priority": 9}
    other = {"high": 2, "weight": 2000, "low": 5}
    # A parameter that one of them does not state counts with its default.
    assert parameters.together([one, other]) == {"high": 3, "weight": 10_000, "priority": 8, "low": 5}
    for setting in parameters.ASKED.values():
        most = {setting.field: setting.most, PERIOD.field: PERIOD.default}
        assert parameters.together([most, most])[setting.field] == setting.most


# Allocations


def claim(consumed: Mapping[str, str], config: list[dict[str, Any]] | None = None, **result: Any) -> dict[str, Any]:
    one = {"request": "gpu", "driver": NAME, "pool": "node", "device": "gpu-0", "consumedCapacity": consumed, **result}
    other = {**one, "driver": "gpu.nvidia.com"}
    devices = {"results": [other, one], "config": config or []}
    metadata = {"name": "c", "namespace": "n", "uid": UID}
    return {"metadata": metadata, "status": {"allocation": {"devices": devices}}}


def opaque(driver: str = NAME, **values: Any) -> dict[str, Any]:
    whole = {"apiVersion": parameters.API_VERSION, "kind": parameters.KIND, **values}
    return {"driver": driver, "parameters": whole}


def test_an_allocation_is_read_into_shares() -> None:
    config = [
        {"source": "FromClass", "opaque": opaque(priority=3)},
        {"source": "FromClaim", "requests": ["gpu"], "opaque": opaque(low="1Gi")},
        {"source": "FromClaim", "requests": ["other"], "opaque": opaque(priority=15)},
        {"source": "FromClaim", "opaque": opaque("gpu.nvidia.com", sharing="yes")},
    ]
    (share,) = granted(claim({"memory": "2Gi", "share": "25"}, config, shareID="s"), UID, "node", [device()]).shares
    assert share == Share(
        "gpu", "node", "gpu-0", "GPU-0", "s", {"high": 2 * GIB, "weight": 2500, "priority": 3, "low": GIB}
    )


def test_a_configuration_of_a_request_is_for_its_alternatives() -> None:
    config = [{"source": "FromClaim", "requests": ["gpu"], "opaque": opaque(priority=9)}]
    (share,) = granted(claim({"memory": "1Gi"}, config, request="gpu/large"), UID, "node", [device()]).shares
    assert share.settings[PRIORITY.field] == 9


@pytest.mark.parametrize(
    ("thing", "devices", "words"),
    [
        (claim({}, pool="elsewhere"), [device()], "nothing of the claim is on this node"),
        (claim({}, device="gpu-7"), [device()], "no GPU gpu-7 any more"),
        (claim({}), [device(present=False)], "is lost"),
        (claim({"memory": "lots"}), [device()], "consumedCapacity"),
        ({"metadata": {"name": "c", "namespace": "n", "uid": UID}}, [device()], "not allocated"),
        ({**claim({}), "metadata": {"name": "c", "namespace": "n", "uid": "another"}}, [device()], "is another"),
    ],
)
def test_what_is_no_claim_of_this_node(thing: dict[str, Any], devices: list[Device], words: str) -> None:
    with pytest.raises(Refused, match=words):
        granted(thing, UID, "node", devices)


@pytest.mark.parametrize(("name", "value"), [("quota", "50%"), ("max", "1Gi"), ("priority", 9)])
def test_a_parameter_that_does_not_act_on_the_node_is_refused(name: str, value: Any) -> None:
    control = parameters.ASKED[name].control
    thing = claim({"memory": "1Gi"}, [{"source": "FromClaim", "opaque": opaque(**{name: value})}])
    assert granted(thing, UID, "node", [device()]).shares
    with pytest.raises(Refused, match=f"parameters.{name}: {control} does not act on this node"):
        granted(thing, UID, "node", [device(**{**ENFORCED, control: "unsupported"})])


# Devices


@pytest.mark.parametrize("memory", [66 << 20, 67 << 20, GIB, 80 * GIB - 4096, 85_520_809_984])
def test_what_is_published_is_taken(memory: int) -> None:
    entry = published(device(memory=memory))
    schema._check_device(entry)
    assert set(entry["capacity"]) == {"memory", "share"}


def test_a_capacity_that_nothing_holds_is_not_given_away() -> None:
    entry = published(device(**{"gmem.limit.high": "unsupported", "compute.weight": "unsupported"}))
    assert entry["capacity"] == {}
    for name in ("memoryLimits", "shares", "hardLimits", "quotas"):
        assert entry["attributes"][name] == {"bool": False}
        assert published(device())["attributes"][name] == {"bool": True}


# CDI files and the store


def test_a_claim_is_one_file_with_a_device_for_each_share(tmp_path: Path) -> None:
    share = Share("gpu", "node", "gpu-0", "GPU-0", None, {"high": GIB})
    one = Claim(UID, "n", "c", [share, share])
    injected = cdi.Injected(("/usr/bin/ggroupfs-dra", "hook"), "/run/ggroup", "/run/x/s.sock", "/l.so", "n/gpu={uuid}")
    directory = cdi.Directory(tmp_path)
    (tmp_path / f".gpu.ggroup.io-share_{UID}.json.new").write_text("{")
    directory.make()
    directory.write(one, injected, Path("/state"))
    (path,) = tmp_path.iterdir()
    spec = json.loads(path.read_text())
    assert [entry["name"] for entry in spec["devices"]] == [f"{UID}-0", f"{UID}-1"]
    assert cdi.ids(one, 1, injected) == ["n/gpu=GPU-0", f"gpu.ggroup.io/share={UID}-1"]
    assert spec["containerEdits"]["env"] == ["LD_PRELOAD=/l.so", "GGROUP_SOCKET=/run/x/s.sock"]
    assert directory.uids() == {UID}
    directory.remove(UID)
    assert not list(tmp_path.iterdir())


def test_a_uid_is_no_path(tmp_path: Path) -> None:
    for uid in ("../x", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="not a UID"):
            Store(tmp_path).claim(uid)


def test_what_the_hook_refuses_is_in_the_system_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path).make()
    said: list[str] = []
    monkeypatch.setattr(syslog, "syslog", lambda level, words: said.append(words))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"pid": os.getpid()})))
    assert hook.main(["--state", str(tmp_path), "--tree", str(tmp_path), UID, "0"]) == 1
    assert said == [f"claim {UID}: it is not prepared on this node"]
    assert capsys.readouterr().err == f"ggroupfs-dra: {said[0]}\n"


# Slices of pods

POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0b5bd9e8_6b9b_4f0a_9bb8_0c5a3d1f4e2a.slice"


@pytest.mark.parametrize(
    ("cgroup", "key", "pod", "container"),
    [
        (f"{POD}/cri-containerd-1.scope", UID, POD, f"{POD}/cri-containerd-1.scope"),
        (f"{POD}/crio-1.scope/container", UID, POD, f"{POD}/crio-1.scope"),
        (f"/kubepods/pod{UID}/abc", UID, f"/kubepods/pod{UID}", f"/kubepods/pod{UID}/abc"),
        ("/machine.slice/libpod-1.scope", "machine.slice_libpod-1.scope", *["/machine.slice/libpod-1.scope"] * 2),
    ],
)
def test_where_a_container_is(cgroup: str, key: str, pod: str, container: str) -> None:
    assert slices.place(cgroup) == slices.Place(key, pod, container)


def test_the_slices_above_are_the_kubelets() -> None:
    assert slices.above(POD) == ["/kubepods.slice/kubepods-burstable.slice", "/kubepods.slice"]
    assert slices.above("/machine.slice/libpod-1.scope") == []


def test_no_level_has_more_than_was_given() -> None:
    first, second = (
        Share("gpu", "node", "gpu-0", "GPU-0", None, {"high": high, "weight": weight, "low": 1})
        for high, weight in ((GIB, 1000), (2 * GIB, 2000))
    )
    claims = {"a": Claim("a", "n", "a", [first]), "b": Claim("b", "n", "b", [second])}
    both = Grants(POD, {f"{POD}/x": ["a/0"], f"{POD}/y": ["a/0", "b/0", "gone/0"]})
    found = slices.wanted(claims, [both])
    assert found[f"{POD}/x", "GPU-0"] == {"high": GIB, "weight": 1000, "low": 1}
    assert found[f"{POD}/y", "GPU-0"] == found[POD, "GPU-0"] == {"high": 3 * GIB, "weight": 3000, "low": 2}
    assert found["/kubepods.slice", "GPU-0"] == {"weight": 3000, "low": 2}
    assert list(found) == sorted(found)
    assert WEIGHT.default == 100
    assert MAX > GIB


# Chart, manifests and examples


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", PACKAGING / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def objects(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one is not None]


def test_the_manifests_are_the_chart_as_it_is_now(render: ModuleType) -> None:
    assert render.MANIFESTS.read_text() == render.rendered(), "make kubernetes"


@pytest.mark.parametrize(
    "values", [{}, {"beside": "", "tolerations": [], "nodeSelector": {"gpu": "yes"}, "resources": {}, "classes": []}]
)
def test_the_chart_is_taken_by_the_schemas(render: ModuleType, values: dict[str, Any]) -> None:
    found = objects(render.rendered(values))
    assert {one["kind"] for one in found} >= {"DaemonSet", "ClusterRole", "DeviceClass", "ServiceAccount"}
    for one in found:
        schema.check(one)


def test_values_that_the_chart_does_not_have_are_refused(render: ModuleType) -> None:
    with pytest.raises(Exception, match="imagee"):
        render.rendered({"imagee": {}})


@pytest.mark.parametrize("path", sorted((PACKAGING / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_taken_by_the_schemas_and_by_the_driver(path: Path) -> None:
    found = objects(path.read_text())
    assert found
    for one in found:
        schema.check(one)
        if one["kind"] == "ResourceClaimTemplate":
            for config in one["spec"]["spec"]["devices"].get("config", ()):
                assert parameters.read(config["opaque"]["parameters"], GIB, by_class=False).values


def test_the_schemas_refuse_what_they_do_not_have() -> None:
    slice_ = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "x"},
        "spec": {"driver": NAME, "nodeName": "n", "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}},
    }
    schema.check(slice_)
    with pytest.raises(schema.Invalid, match="colour"):
        schema.check({**slice_, "spec": {**slice_["spec"], "colour": "red"}})
