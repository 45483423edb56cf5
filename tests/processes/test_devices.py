"""`keras-mirror devices --join` on every worker: each lists the devices of all."""

import json
import subprocess
import sys

import cluster

COMMAND = [sys.executable, "-m", "keras_mirror", "devices", "--join"]


def start(hosts, index, devices, *options):
    task = {"type": "worker", "index": index}
    config = json.dumps({"cluster": {"worker": hosts}, "task": task})
    return subprocess.Popen(
        [*COMMAND, *options],
        env=cluster.environment(devices) | {"TF_CONFIG": config},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_worker_lists_the_devices_of_all():
    hosts = [f"127.0.0.1:{port}" for port in cluster.free_ports(2)]
    workers = [start(hosts, 0, 2), start(hosts, 1, 1, "--json")]
    (table, said), (text, said_too) = [w.communicate(timeout=120) for w in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said + said_too
    rows = [line.split() for line in table.splitlines()[1:4]]
    assert [row[-1] for row in rows] == ["0", "0", "1"]
    assert "cluster: 2 workers, from TF_CONFIG; this is worker 0" in table
    assert f"worker 1: {hosts[1]}" in table
    found = json.loads(text)
    assert [device["worker"] for device in found["devices"]] == [0, 0, 1]
    assert [device["name"] for device in found["devices"]] == [row[0] for row in rows]
    assert found["cluster"]["index"] == 1


def test_joining_without_a_cluster_is_refused():
    done = subprocess.run(
        COMMAND, env=cluster.environment(1), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "needs a cluster to join" in done.stderr
