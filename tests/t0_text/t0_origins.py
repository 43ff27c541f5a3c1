"""What the path of a cgroup says about its origin (job, pod, container, unit, user), and what a user cannot fake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggroupfs.text.origins import UNIT_MOST, WORDS, origin

ID = "0f6ad2a1c5c4d2f9" * 4
OTHER = "f" * 64
UID = "6d1f0c7e-98f4-4a3c-8c43-0a3a0b9c1d2e"
STATIC = "0123456789abcdef" * 2
SYSTEMD_UID = UID.replace("-", "_")

SLURM = "/system.slice/slurmstepd.scope"
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice"
USER = "/user.slice/user-1000.slice"
MANAGER = f"{USER}/user@1000.service"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/", {}),
        # Slurm
        (f"{SLURM}/job_123", {"job": "123", "unit": "slurmstepd.scope"}),
        (f"{SLURM}/job_123/step_0", {"job": "123", "step": "0", "unit": "slurmstepd.scope"}),
        (f"{SLURM}/job_123/step_batch/user/task_0", {"job": "123", "step": "batch", "unit": "slurmstepd.scope"}),
        ("/system.slice/n1_slurmstepd.scope/job_7", {"job": "7", "unit": "n1_slurmstepd.scope"}),
        (f"{SLURM}/system", {"unit": "slurmstepd.scope"}),
        # Kubernetes
        (BURSTABLE, {"pod": UID}),
        (f"{BURSTABLE}/cri-containerd-{ID}.scope", {"pod": UID, "container": ID}),
        (f"{BURSTABLE}/crio-{ID}.scope/container", {"pod": UID, "container": ID}),
        (f"{BURSTABLE}/crio-conmon-{ID}.scope", {"pod": UID}),
        (f"/kubepods.slice/kubepods-pod{STATIC}.slice/docker-{ID}.scope", {"pod": STATIC, "container": ID}),
        (f"/kubepods/besteffort/pod{UID}/{ID}", {"pod": UID, "container": ID}),
        (f"/kubepods/pod{UID}", {"pod": UID}),
        (
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
            f"kubelet-kubepods-besteffort-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope",
            {"pod": UID, "container": ID},
        ),
        ("/kubepods.slice/kubepods-burstable.slice", {"unit": "kubepods-burstable.slice"}),
        # containers
        (f"/system.slice/docker-{ID}.scope", {"container": ID}),
        (f"/docker/{ID}", {"container": ID}),
        (f"/machine.slice/libpod-{ID}.scope/container", {"container": ID}),
        (f"/machine.slice/libpod-conmon-{ID}.scope", {"unit": f"libpod-conmon-{ID}.scope"}),
        (f"/system.slice/docker.service/{ID}", {"container": ID, "unit": "docker.service"}),
        (f"{MANAGER}/user.slice/libpod-{ID}.scope/container", {"container": ID, "user": "1000"}),
        # systemd
        ("/system.slice/trainer.service", {"unit": "trainer.service"}),
        ("/system.slice/system-getty.slice/getty@tty1.service", {"unit": "getty@tty1.service"}),
        ("/system.slice/_cpu.service", {"unit": "cpu.service"}),
        ("/batch.slice", {"unit": "batch.slice"}),
        ("/batch.slice/batch-gpu.slice", {"unit": "batch-gpu.slice"}),
        ("/system.slice/a.service/b.service", {"unit": "a.service"}),
        (f"/system.slice/a.service/{ID}", {"unit": "a.service"}),  # another's container, if its user says so
        # users
        (USER, {"unit": "user-1000.slice", "user": "1000"}),
        (f"{USER}/session-3.scope", {"unit": "session-3.scope", "user": "1000"}),
        (MANAGER, {"unit": "user@1000.service", "user": "1000"}),
        (f"{MANAGER}/app.slice/notebook.service", {"unit": "notebook.service", "user": "1000"}),
        # names that say nothing
        ("/job_5", {}),
        ("/docker", {}),
        (f"/docker/{ID[:-1]}", {}),
        (f"{SLURM}/job_x", {"unit": "slurmstepd.scope"}),
        (f"{SLURM}/job_5\n", {"unit": "slurmstepd.scope"}),
        (f"{SLURM}/job_{'9' * 21}", {"unit": "slurmstepd.scope"}),
        ("/user.slice/user-1000.slicer", {"unit": "user.slice"}),
        ('/a"b.service', {}),
        ("/a\nb.service", {}),
    ],
)
def test_what_a_path_tells(path: str, told: dict[str, str]) -> None:
    assert origin(path) == told
    assert list(told) == [word for word in WORDS if word in told]


@pytest.mark.parametrize("above", [MANAGER, f"{MANAGER}/app.slice/a.service", "/system.slice/a.service/delegated"])
@pytest.mark.parametrize("path", [f"{SLURM}/job_1/step_0", BURSTABLE, f"/kubepods/pod{UID}"])
def test_a_user_makes_no_job_and_no_pod(above: str, path: str) -> None:
    """Below a directory that was delegated to a user, names like those of a job or a pod are not believed."""
    found = origin(above + path)
    assert not {"job", "step", "pod"} & found.keys()
    assert found.get("user") == origin(above).get("user")


def test_nothing_in_a_container_is_another_one() -> None:
    assert origin(f"{BURSTABLE}/cri-containerd-{ID}.scope/docker-{OTHER}.scope")["container"] == ID
    assert origin(f"{SLURM}/job_1/step_0/job_2/step_3") == origin(f"{SLURM}/job_1/step_0")
    assert origin(f"{USER}/x/user.slice/user-0.slice")["user"] == "1000"


def test_a_long_name_is_cut() -> None:
    unit = "a" * 247 + ".service"
    assert origin(f"/system.slice/{unit}")["unit"] == unit[: UNIT_MOST - 3] + "..."


@given(st.lists(st.one_of(st.text(), st.sampled_from([*SLURM.split("/"), *BURSTABLE.split("/"), ID])), max_size=9))
def test_every_value_is_short_and_of_few_letters(parts: list[str]) -> None:
    for word, value in origin("/" + "/".join(parts)).items():
        assert word in WORDS
        assert 0 < len(value) <= UNIT_MOST
        assert value.isascii()
        assert value.isprintable()
        assert '"' not in value
