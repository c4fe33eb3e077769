"""What preflight finds: processes that differ, folders that cannot be written, too little room, slow links."""

import collections
import json
import shutil

import jax
import numpy as np
import pytest

from llm.preflight import preflight, table
from parallel import distributed, links
from parallel.mesh import make_mesh
from tests.jobs import job, running
from tests.llm.runs import SMALL, small

NAMES = ["versions", "code", "configuration", "data", "folder", "devices", "space", "axis data", "axis pipe"]
MESH = dict(mesh__pipe=2, mesh__data=4)


@pytest.mark.smoke
def test_one_process(tmp_path):
    document = preflight(small(**MESH), tmp_path)
    assert list(document) == ["ok", "checks", "axes"] and document["ok"]
    assert [check["name"] for check in document["checks"]] == NAMES
    assert [list(axis) for axis in document["axes"]] == [["axis", "bytes", "gb_per_s"]] * 2
    assert [axis["axis"] for axis in document["axes"]] == ["data", "pipe"]
    assert all(axis["gb_per_s"] > 0 for axis in document["axes"])
    assert not list((tmp_path / "checkpoints").iterdir())
    assert "FAIL" not in table(document) and "GB/s" in table(document)


@pytest.mark.smoke
def test_what_is_wrong_is_named(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").write_text("a file")
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 10))
    monkeypatch.setattr(links, "measure", lambda *_: links.Measured("all-reduce", 8, 1.0, ["slow link: a to b"]))
    document = preflight(small(**MESH, data__paths="nowhere"), tmp_path)
    failed = {check["name"]: check["detail"] for check in document["checks"] if not check["ok"]}
    assert not document["ok"] and list(failed) == ["data", "folder", "space", "axis data", "axis pipe"]
    assert "nowhere" in failed["data"] and "File exists" in failed["folder"] and "slow link" in failed["axis data"]
    assert "2 checkpoints need" in failed["space"] and "--workdir" in failed["space"]
    assert table(document).count("FAIL") == 5
    other = preflight(small(mesh__pipe=3), tmp_path)
    assert [check["name"] for check in other["checks"] if not check["ok"]] == ["folder", "devices"]


@pytest.mark.smoke
def test_a_slow_link_is_named(monkeypatch):
    mesh = make_mesh(dict(pipe=4, data=2))
    monkeypatch.setattr(distributed, "nodes", lambda devices: [device.id // 2 for device in devices])
    monkeypatch.setattr(distributed, "facts", lambda: [dict(host="alpha")])
    times = np.full(mesh.devices.shape, 1e-3)
    times[0, 1, 2] = 9e-3  # from data 1, pipe 1 to data 1, pipe 2
    (text,) = links._slow(mesh, "pipe", times)
    source, target = (d.local_hardware_id for d in mesh.devices[0, 1, 1:3].ravel())
    assert text.startswith(f"slow link: device {source} of process 0 (alpha) to device {target} of process 0 (alpha) takes 9.0")
    monkeypatch.setattr(distributed, "nodes", lambda devices: [0] * len(devices))
    assert links._slow(mesh, "pipe", times) == []  # in the memory of one process nothing is a link


def test_bandwidth_counts_what_a_device_sends(monkeypatch):
    mesh = make_mesh(dict(data=4))
    monkeypatch.setattr(links, "_times", lambda mesh, run, x: np.full(mesh.devices.shape, 1e-3))
    assert links.measure(mesh, "data").gb_per_s == pytest.approx((1 << 20) * 2 * 3 / 4 / 1e-3 / 1e9)
    mesh = make_mesh(dict(pipe=4))
    assert links.measure(mesh, "pipe").gb_per_s == pytest.approx((1 << 20) / 1e-3 / 1e9)


def test_two_processes(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("from llm.config import Config\n\nget_config = Config\n")
    options = [f"--config.{name}={value}" for name, value in {**SMALL, "mesh.pipe": 2, "mesh.data": 4}.items()]
    flags = [f"--config={config}", f"--workdir={tmp_path / 'run'}", "--json", *options]
    alike, other = job(2, "preflight", *flags), job(2, "preflight", *flags)
    other[1].append("--config.optimizer.lr=0.5")
    with running(alike, tmp_path / "alike") as children:
        first, second = children.wait()
        assert (first.code, second.code, second.out) == (0, 0, ""), children.output()
    document = json.loads(first.out)
    assert [check["name"] for check in document["checks"]] == [*NAMES[:6], "shared folder", *NAMES[6:]]
    details = {check["name"]: check["detail"] for check in document["checks"]}
    assert "in all 2 processes" in details["versions"] and details["devices"] == "8 cpu, 4 in each of 2 processes"
    with running(other, tmp_path / "other") as children:
        first, second = children.wait()
        assert (first.code, second.code) == (4, 4), children.output()
    document = json.loads(first.out)
    failed = [check for check in document["checks"] if not check["ok"]]
    assert [check["name"] for check in failed] == ["configuration"] and "process 1" in failed[0]["detail"]
    assert jax.process_count() == 1
