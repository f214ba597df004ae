"""deploy/: every manifest fits its schema, and the chart and the kustomize overlays make the same objects."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered import CLUSTER, DEPLOY, KUSTOMIZE, Objects, chart, kustomize, missing, objects, ordered, tool

from segue.cli.main import parser
from segue.kv import Limits

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

WATCHED = ("monitoring.enabled=true", "keda.enabled=true")
MOONCAKE = ("llmd.kvConnector=mooncake", "llmd.podNetworks={10.0.0.0/8,fd00::/8}")
#: The values of each way to run the chart.
WAYS = {
    "own": (),
    "own-watched": WATCHED,
    "own-keys": (
        "apiKeysSecret=keys",
        "model.claim=models",
        "cacheClaim=cache",
        "frontend.service=LoadBalancer",
    ),
    "own-pods": (
        "imagePullSecrets[0].name=registry",
        "tolerations[0].operator=Exists",
        "decode.nodeSelector.pool=gpu",
        "decode.env[0].name=HF_HUB_OFFLINE",
        "decode.env[0].value=yes",
        "priorityClassName=high",
        "podAnnotations.a=b",
    ),
    "llm-d": ("mode=llm-d",),
    "llm-d-mooncake": ("mode=llm-d", *MOONCAKE, *WATCHED),
}
#: Folders of CustomResourceDefinitions of other projects: `docs/kubernetes.md` says where they come from.
CRDS = CLUSTER / "crds"
BY_CRD = Path(__file__).with_name("by_crd.py")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return {name: chart(*values) for name, values in WAYS.items()}


@pytest.fixture(scope="module")
def faults(made: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the API's schemas say against the objects of each way, and of two that are wrong."""
    folder = tmp_path_factory.mktemp("objects")
    wrong = {"replicas: two": "wrong-type", "replicaz: 2": "wrong-name"}
    texts = made | {name: made["own"].replace("replicas: 2", line) for line, name in wrong.items()}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    files = [str(folder / f"{name}.yaml") for name in texts]
    done = tool("kubernetes-validate", "--strict", "--quiet", "--no-warn", "-k", "1.37", *files)
    lines = done.stdout.splitlines()
    assert all(line.startswith("ERROR ") for line in lines), done.stdout + done.stderr
    return {name: [line for line in lines if f"/{name}.yaml " in line] for name in texts}


@pytest.mark.parametrize("way", WAYS)
def test_every_object_of_the_chart_fits_its_schema(way: str, faults: dict[str, list[str]]) -> None:
    assert faults[way] == []


def test_a_wrong_manifest_does_not_fit(faults: dict[str, list[str]]) -> None:
    assert any("spec.replicas: 'two' is not of type" in line for line in faults["wrong-type"])
    assert any("'replicaz' was unexpected" in line for line in faults["wrong-name"])


@pytest.mark.skipif(not CRDS.exists(), reason=f"no CustomResourceDefinitions in {CRDS}")
def test_objects_of_other_projects_fit_their_own_schemas(made: dict[str, str], tmp_path: Path) -> None:
    texts = dict(made)
    texts["wrong-name"] = made["llm-d"].replace("targetPorts:", "targetPortz:")
    texts["wrong-type"] = made["llm-d"].replace("number: 8000", "number: many")
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    done = tool("python", str(BY_CRD), str(CRDS), *map(str, sorted(tmp_path.glob("*.yaml"))))
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert {kind for _, kind, *_ in lines} == {
        "InferencePool",
        "PodMonitor",
        "ScaledObject",
        "ServiceMonitor",
    }
    assert {name for name, _, *faults in lines if faults} == {"wrong-name", "wrong-type"}, done.stdout


def kustomized(overlay: str, components: tuple[str, ...], folder: Path) -> Objects:
    """An overlay with some components, as a user would write it."""
    paths = {"resources": [KUSTOMIZE / "overlays" / overlay]}
    if components:
        paths["components"] = [KUSTOMIZE / "components" / name for name in components]
    # kustomize takes no absolute paths.
    words = {
        key: ["../" * len(folder.resolve().parts[1:]) + str(path)[1:] for path in found]
        for key, found in paths.items()
    }
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(head | words))
    return objects(kustomize(folder))


@pytest.mark.parametrize(
    ("overlay", "components", "values"),
    [
        ("own", (), ()),
        ("own", ("monitoring", "keda"), WATCHED),
        ("llm-d", (), ("mode=llm-d",)),
        ("llm-d", ("monitoring-llm-d", "keda"), ("mode=llm-d", *WATCHED)),
    ],
    ids=["own", "own-watched", "llm-d", "llm-d-watched"],
)
def test_the_chart_and_kustomize_make_the_same_objects(
    overlay: str, components: tuple[str, ...], values: tuple[str, ...], tmp_path: Path
) -> None:
    # Kustomize does not tell a query its namespace.
    ours = objects(chart(*values).replace('namespace="default",', ""))
    theirs = kustomized(overlay, components, tmp_path)
    assert theirs.keys() == ours.keys()
    for key, one in ours.items():
        assert ordered(theirs[key]) == ordered(one), key


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (("requestBudgetS=0",), "at '/requestBudgetS': minimum: got 0, want 1"),
        (("prefil.replicas=3",), "additional properties 'prefil' not allowed"),
        (("mode=vllm",), "at '/mode': value must be one of 'own', 'llm-d'"),
        (("image.tag=latest",), "image.tag latest names another image from day to day"),
        (("decode.memory=much",), "at '/decode/memory': 'much' does not match pattern"),
        (("keda.enabled=true",), "keda.enabled needs monitoring.enabled: KEDA reads the waiting requests"),
        (
            (*WATCHED, "keda.maxReplicas=1"),
            "keda.maxReplicas 1 is below prefill.replicas 2, which is the least that KEDA keeps",
        ),
        (
            ("mode=llm-d", "llmd.kvConnector=mooncake"),
            "llmd.kvConnector mooncake needs llmd.podNetworks: decode contacts prefill pods in these",
        ),
        (
            ("decode.extraArgs={--port=1}",),
            "decode.extraArgs has --port, which the chart sets itself: Services, probes and policies depend",
        ),
        (
            ("decode.extraArgs={--data_port=1}",),
            "decode.extraArgs has --data-port, which the chart sets itself",
        ),
        (("decode.extraArgs={--port 1}",), "at '/decode/extraArgs/0': '--port 1' does not match pattern"),
        (
            ("frontend.extraArgs={--drain-s=600}",),
            "frontend.extraArgs has --drain-s: give requestBudgetS or shutdownDelayS, from which",
        ),
        (("prefill.extraArgs={--request-budget-s=600}",), "prefill.extraArgs has --request-budget-s: give"),
        (("frontend.extraArgs={--shutdown-delay-s=600}",), "frontend.extraArgs has --shutdown-delay-s: give"),
        (("frontend.extraArgs={--api-key=k}",), "frontend.extraArgs has --api-key: give apiKeysSecret"),
        (("env[0].name=SEGUE_REGISTRY",), "env has SEGUE_REGISTRY, which the chart sets itself"),
        (("decode.env[0].name=POD_IP",), "env has POD_IP, which the chart sets itself"),
        ((r"decode.podLabels.app\.kubernetes\.io/name=x",), "podLabels has app.kubernetes.io/name, by which"),
        (("tolerations[0].effect=Never",), "at '/tolerations/0/effect'"),
        (("allowedHosts={http://a}",), "at '/allowedHosts/0'"),
        (("kvGiB=0",), "at '/kvGiB'"),
        (("mode=llm-d", "kvGiB=0.5"), "kvGiB 0.5: vLLM takes whole GiB (VLLM_CPU_KVCACHE_SPACE)"),
        (("mode=llm-d", "apiKeysSecret=keys"), "apiKeysSecret is for mode own: let llm-d's gateway ask"),
        (
            ("apiKeysSecret=keys", "monitoring.enabled=true"),
            "apiKeysSecret with monitoring.enabled needs monitoring.authorization: /metrics asks for a key",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(values: tuple[str, ...], sentence: str) -> None:
    words = [word for one in values for word in ("--set", one)]
    done = tool("helm", "template", "segue", str(DEPLOY / "chart"), *words)
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.parametrize("flag", ['--speculative-config={"method": "ngram"}', "--name=a #b", "--x=yes: no"])
def test_a_further_flag_reaches_the_program_as_it_was_given(flag: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({part: {"extraArgs": [flag]} for part in ("decode", "frontend")}))
    for mode in ("own", "llm-d"):
        done = tool(
            "helm", "template", "segue", str(DEPLOY / "chart"), "-f", str(values), "--set", f"mode={mode}"
        )
        assert done.returncode == 0, done.stderr
        found = objects(done.stdout)
        for part in ("decode", "frontend") if mode == "own" else ("decode",):
            [container] = found["Deployment", f"segue-{part}"]["spec"]["template"]["spec"]["containers"]
            assert container["args"][-1] == flag


#: Settings that every pod gets, and further ones of decode.
PODS = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu", "zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "podAnnotations": {"example.com/scrape": "true"},
    "podLabels": {"team": "chat"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "envFrom": [{"secretRef": {"name": "tokens"}}],
    "allowedHosts": ["chat.example", "*.chat.example"],
    "decode": {
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"key": "decode", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "higher",
        "podAnnotations": {"example.com/part": "decode"},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hf"}}}],
    },
}


@pytest.mark.parametrize("mode", ["own", "llm-d"])
def test_settings_of_pods_reach_every_pod_and_those_of_a_part_its_own(mode: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(PODS))
    words = ("-f", str(values), "--set", f"mode={mode}")
    done = tool("helm", "template", "segue", str(DEPLOY / "chart"), *words)
    assert done.returncode == 0, done.stderr
    found = {name: one for (kind, name), one in objects(done.stdout).items() if kind == "Deployment"}
    assert len(found) == (3 if mode == "own" else 2)
    for name, one in found.items():
        template = one["spec"]["template"]
        pod, decode = template["spec"], name == "segue-decode"
        assert pod["imagePullSecrets"] == PODS["imagePullSecrets"]
        assert pod["nodeSelector"] == {"pool": "gpu", "zone": "b" if decode else "a"}
        assert [one["key"] for one in pod["tolerations"]] == ["gpu", *(["decode"] if decode else [])]
        assert list(pod["affinity"]) == ["nodeAffinity" if decode else "podAntiAffinity"]
        assert pod["priorityClassName"] == ("higher" if decode else "high")
        assert pod["runtimeClassName"] == "nvidia"
        assert template["metadata"]["annotations"]["example.com/scrape"] == "true"
        assert ("example.com/part" in template["metadata"]["annotations"]) is decode
        assert template["metadata"]["labels"]["team"] == "chat"
        assert "team" not in one["spec"]["selector"]["matchLabels"]
        [container] = pod["containers"]
        variables = [variable["name"] for variable in container["env"]]
        assert ("HTTPS_PROXY" in variables, "HF_TOKEN" in variables) == (True, decode)
        assert container["envFrom"] == PODS["envFrom"]
        if name == "segue-frontend":
            [hosts] = [one["value"] for one in container["env"] if one["name"] == "SEGUE_ALLOWED_HOSTS"]
            assert hosts.split(",")[0] == "segue-frontend"
            assert hosts.endswith(".svc.cluster.local,chat.example,*.chat.example")


def test_an_instance_asks_for_a_key_where_the_frontend_does(made: dict[str, str]) -> None:
    """Its HTTP port generates, too (direct mode)."""
    for _, container in containers(objects(made["own-keys"])):
        found = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert found["SEGUE_API_KEY_FILE"] == "/etc/segue/keys/keys", container["name"]
        assert "/etc/segue/keys" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_each_deployment_is_scaled_by_its_own_requests(made: dict[str, str]) -> None:
    """One Prometheus may see several: a second release, or one of the same name in another namespace."""
    found = objects(made["own-watched"])
    for part in ("prefill", "decode"):
        [trigger] = found["ScaledObject", f"segue-{part}"]["spec"]["triggers"]
        labels = (
            f'namespace="default",app_kubernetes_io_instance="segue",app_kubernetes_io_component="{part}"'
        )
        assert trigger["metadata"]["query"] == f"sum(vllm:num_requests_waiting{{{labels}}})"
    for part in ("instances", "frontend"):
        labels = found["ServiceMonitor", f"segue-{part}"]["spec"]["podTargetLabels"]
        assert labels == ["app.kubernetes.io/instance", "app.kubernetes.io/component"]


@pytest.mark.parametrize("mode", ["own", "llm-d"])
def test_alerts_find_the_targets_of_every_release(mode: str) -> None:
    """SegueDown looks for `segue` in the name of the job, which is otherwise that of the Service."""
    found = objects(chart(*WATCHED, f"mode={mode}", release="chat"))
    for (kind, _), one in found.items():
        if kind in ("ServiceMonitor", "PodMonitor"):
            assert one["spec"]["jobLabel"] == "app.kubernetes.io/name"
            chosen = one["spec"]["selector"]["matchLabels"]
            assert chosen["app.kubernetes.io/name"] == "segue"


def test_the_chart_needs_the_version_that_has_its_hooks() -> None:
    """`preStop: sleep` is on by default since Kubernetes 1.30."""
    for version, status in (("1.29.9", 1), ("1.30.0", 0)):
        words = ("--kube-version", version, "--set", "mode=llm-d")
        assert tool("helm", "template", "segue", str(DEPLOY / "chart"), *words).returncode == status


def containers(found: Objects) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container with the spec of its pod."""
    for (kind, _), one in found.items():
        if kind == "Deployment":
            pod = one["spec"]["template"]["spec"]
            for container in [*pod["containers"], *pod.get("initContainers", ())]:
                yield pod, container


@pytest.mark.parametrize("way", WAYS)
def test_every_pod_is_confined_and_ends_slower_than_its_requests(way: str, made: dict[str, str]) -> None:
    for pod, container in containers(objects(made[way])):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["terminationGracePeriodSeconds"] == 120 + 60
        inside = container["securityContext"]
        assert inside["readOnlyRootFilesystem"]
        assert inside["capabilities"] == {"drop": ["ALL"]}
        assert inside["allowPrivilegeEscalation"] is False
        if "startupProbe" in container:
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def test_segue_knows_every_command_of_the_manifests(made: dict[str, str]) -> None:
    """Each command, each preStop hook and each variable is one of the commands' own."""
    seen = set()
    for _, container in containers(objects(made["own-keys"])):
        top, commands = parser()
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        lines = [container["command"] + container["args"], *([hook] if hook else [])]
        for program, *words in lines:
            assert program == "segue"
            _, unknown = top.parse_known_args(words)
            assert unknown == []
            seen.add(words[0])
        words = set(commands[container["args"][0]].words())
        for variable in container["env"]:
            name = variable["name"]
            if name.startswith("SEGUE_"):
                assert "--" + name.removeprefix("SEGUE_").lower().replace("_", "-") in words, name
    assert seen == {"prefill", "decode", "frontend", "drain"}


def test_compose_and_systemd_start_what_segue_knows() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["segue"]
    top, _ = parser()
    assert top.parse_known_args(service["command"])[1] == []
    unit = (DEPLOY / "systemd" / "segue@.service").read_text()
    [line] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    for role in ("prefill", "decode", "frontend"):
        words = line.replace("%i", role).split()[1:]
        assert top.parse_known_args(words)[1] == []
    assert "Type=notify" in unit


def test_the_default_budget_of_the_chart_is_shorter_than_that_of_segue() -> None:
    """A pod that leaves would otherwise outlast every usual limit of a node's shutdown."""
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    assert values["requestBudgetS"] <= Limits().request_budget_s


def test_no_manifest_names_a_registry_but_in_an_image() -> None:
    for file in sorted(DEPLOY.rglob("*")):
        if file.is_file():
            for line in file.read_text().splitlines():
                assert "pypi.org" not in line, textwrap.shorten(line, 80)
                assert "://download." not in line, file
