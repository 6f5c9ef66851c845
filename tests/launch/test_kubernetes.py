import tomllib

import pytest
import yaml

from stretto.cli import main
from stretto.job import Job
from stretto.launch.kubernetes import Pods, manifest, text
from stretto.launch.placing import Placing

JOB = Job.load("tiny", mesh="dp=4", name="My.Run_1")
PLACE = Placing(2, 4, True, True)


def documents(*kinds, pods=None, place=PLACE):
    return list(yaml.safe_load_all(manifest(JOB, place, pods or Pods("registry/stretto:1", "disk"), kinds or ("jobset", "pytorchjob"))))


def test_the_job_travels_whole_in_a_config_map():
    for config, workload in (documents()[:2], documents()[2:]):
        assert Job.of(tomllib.loads(config["data"]["job.toml"])) == JOB
        pod = pods_of(workload)[0]
        assert config["metadata"]["name"] in [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        assert "/job/job.toml" in pod["containers"][0]["command"]


def pods_of(workload):
    if workload["kind"] == "JobSet":
        return [workload["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
    return [replica["template"]["spec"] for replica in workload["spec"]["pytorchReplicaSpecs"].values()]


def test_the_pods_of_a_job_set_meet_at_the_first_by_its_name():
    _, made = documents("jobset")
    name, spec = made["metadata"]["name"], made["spec"]["replicatedJobs"][0]
    command = pods_of(made)[0]["containers"][0]["command"]
    option = lambda key: command[command.index(key) + 1]
    # JobSet calls a pod SET-JOB-REPLICA-INDEX, in a subdomain of the set's name
    assert option("--master-addr") == f"{name}-{spec['name']}-0-0.{name}"
    assert (option("--nnodes"), option("--nproc-per-node"), option("--node-rank")) == ("2", "2", "$(JOB_COMPLETION_INDEX)")
    assert spec["template"]["spec"]["completions"] == spec["template"]["spec"]["parallelism"] == 2
    assert spec["template"]["spec"]["completionMode"] == "Indexed"


def test_a_pytorch_job_has_one_master_and_the_other_nodes_as_workers():
    _, made = documents("pytorchjob")
    roles = made["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 1} and made["spec"]["nprocPerNode"] == "2"
    assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods_of(made))
    (_, alone) = documents("pytorchjob", place=Placing(1, 2, False, True))
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_each_rank_has_a_gpu_and_the_volume_keeps_the_run():
    for workload in documents()[1::2]:
        for pod in pods_of(workload):
            assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
            assert {"name": "runs", "persistentVolumeClaim": {"claimName": "disk"}} in pod["volumes"]
    (_, lost) = documents("jobset", pods=Pods("x", None), place=Placing(1, 2, False, True))
    assert {"name": "runs", "emptyDir": {}} in pods_of(lost)[0]["volumes"] and "resources" not in pods_of(lost)[0]["containers"][0]


def test_two_runs_of_one_job_do_not_write_one_folder():
    outs = {pods_of(workload)[0]["containers"][0]["command"][-2] for workload in documents()[1::2]}
    assert len(outs) == 2


@pytest.mark.parametrize(
    "value", [{"a": {"b": [{"c": 1, "d": ["x", "y"]}, {"e": {}}]}, "f": "line\n  more\n\nend\n", "g": "yes", "h": [], "i": None}]
)
def test_yaml_reads_back_as_it_was(value):
    assert yaml.safe_load(text(value)) == value


def test_the_command_prints_what_kubectl_takes(capsys):
    assert main(["train", "tiny", "--on", "kubernetes", "--print", "--image", "x"]) == 0
    said = capsys.readouterr().out
    assert [document["kind"] for document in yaml.safe_load_all(said)] == ["ConfigMap", "JobSet", "ConfigMap", "PyTorchJob"]
    assert "checkpoints and logs go with the pods" in said
