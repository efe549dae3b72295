"""Engines and processes compute on no more cores than their container's quota pays for."""

import os
import socket

import pytest

from engine_host import cores
from engine_host.cores import bind_engine, cpu_quota, usable_cores, within_quota

V1 = "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        ("0::/user.slice/a.scope\n", {"user.slice/a.scope/cpu.max": "50000 100000"}, 0.5),
        (
            "0::/user.slice/a.scope\n",
            {"user.slice/a.scope/cpu.max": "max 100000", "user.slice/cpu.max": "150000 50000"},
            3.0,
        ),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "400000 100000"}, 4.0),
        ("0::/../../pod\n", {"cpu.max": "200000 100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/docker/a/cpu.cfs_quota_us": "200000", "cpu/docker/a/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "nonsense", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, groups, files, quota):
    written = {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}
    for name, text in ({"proc/self/cgroup": groups} | written).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("binding", "quota", "per_rank"),
    [
        ("0,1,2,3,4,5,6,7,8,9,10,11,12,13", 2.0, [2]),
        ("0,1,2,3", 2.9, [2]),
        ("0,1,2,3", 0.5, [1]),
        ("0,1,2,3", 4.0, [4]),
        ("0,1,2,3", 64.0, [4]),
        ("0,1,2,3", None, [4]),
        ("0,1,2|3,4,5", 4.0, [2, 2]),
        ("0,1,2|3,4", 1.0, [1, 1]),
    ],
)
def test_an_engine_has_as_many_cores_as_its_quota_pays_for(binding, quota, per_rank):
    found = [rank.split(",") for rank in within_quota(binding, quota).split("|")]
    assert [len(set(rank)) for rank in found] == per_rank
    for kept, all_of_them in zip(found, binding.split("|"), strict=True):
        assert set(kept) <= set(all_of_them.split(","))
        assert kept == sorted(kept, key=int)


def test_containers_of_one_host_do_not_all_take_the_first_cores(monkeypatch):
    taken = set()
    for number in range(32):
        monkeypatch.setattr(socket, "gethostname", lambda number=number: f"pod-{number}")
        taken.add(within_quota(",".join(map(str, range(16))), 2.0))
    assert len(taken) > 8


def test_a_replica_is_bound_by_its_rank_within_the_quota(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setattr(cores, "cpu_quota", lambda: 1.0)
    bind_engine((), 0)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
    bind_engine(("0,1", "2"), 3)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2"
    bind_engine(("0,1", "2"), 2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] in {"0", "1"}


@pytest.mark.parametrize(("quota", "count"), [(None, 16), (2.0, 2), (40.0, 16), (0.2, 1)])
def test_a_process_may_use_as_many_cores_as_its_quota_pays_for(monkeypatch, quota, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    found = usable_cores()
    assert len(found) == len(set(found)) == count
    assert found == sorted(found)
