"""What an application of Ray Serve is made of, without Ray."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from segue.integrations.ray.ray_plan import plan
from segue.kv import ConfigError, Role
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.settings.layers import argv

TWO = {
    "model": "m",
    "dtype": "float32",
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3, "max_batch": 4},
}


def flags(config: InstanceConfig | FrontendConfig) -> list[str]:
    return argv(config)


def test_each_part_gets_the_entries_at_the_top_and_those_of_its_table() -> None:
    made = plan(TWO)
    prefill, decode = made.instances
    assert [(part.role, part.replicas) for part in made.instances] == [(Role.PREFILL, 2), (Role.DECODE, 3)]
    assert "--max-batch=4" in flags(decode.config)
    assert "--max-batch=4" not in flags(prefill.config)
    assert all("--dtype=float32" in flags(part.config) for part in made.instances)
    assert (made.frontend.replicas, made.frontend.config.port) == (1, 0)
    assert (made.registry, made.registry_port, made.pair) == (None, 8998, ())
    assert "--allowed-hosts=*" in flags(made.frontend.config), "Ray's proxy has the names of its own"
    named = plan({**TWO, "frontend": {"allowed_hosts": "ray.example"}})
    assert "--allowed-hosts=ray.example" in flags(named.frontend.config)


def test_threads_and_cpus_follow_from_each_other() -> None:
    made = plan({"model": "m", "prefill": {"cpus": 5, "tp": 2}, "decode": {"threads_per_worker": 3, "pp": 2}})
    prefill, decode = made.instances
    assert (prefill.cpus, prefill.threads) == (5.0, 2)
    assert (decode.cpus, decode.threads) == (6.0, 3)
    assert "--threads-per-worker=2" in flags(prefill.config)
    small = plan({"model": "m", "decode": {"cpus": 0.5}}).instances[1]
    assert (small.cpus, small.threads) == (0.5, 1)


def test_counts_are_no_part_of_a_version() -> None:
    before, after = plan(TWO), plan({**TWO, "decode": {"replicas": 1, "max_batch": 4}})
    assert before.version(before.instances[1]) == after.version(after.instances[1])
    other = plan({**TWO, "decode": {"max_batch": 5}})
    assert before.version(before.instances[1]) != other.version(other.instances[1])
    assert before.version(before.instances[0]) == other.version(other.instances[0])


def test_pairs_stand_alone_or_beside_more_instances() -> None:
    made = plan({"model": "m", "pairs": 2})
    assert (made.instances, made.pairs, [part.role for part in made.pair]) == (
        (),
        2,
        [Role.PREFILL, Role.DECODE],
    )
    beside = plan({"model": "m", "pairs": 1, "decode": {"replicas": 2}})
    assert [(part.role, part.replicas) for part in beside.instances] == [(Role.DECODE, 2)]


def test_the_actors_of_a_pair_have_what_the_larger_part_needs() -> None:
    parts = {
        "prefill": {"cpus": 1, "resources": {"work": 2, "fast": 1}},
        "decode": {"cpus": 3, "resources": {"work": 1}, "drain_s": 600},
    }
    gang = plan({"model": "m", "pairs": 2, **parts}).gang
    assert (gang.replicas, gang.cpus, gang.resources) == (4, 3.0, {"work": 2.0, "fast": 1.0})
    assert gang.config.limit.drain_s == 600
    beside = plan({"model": "m", "pairs": 1, "prefill": {"replicas": 1, "one_per_node": True}})
    assert (beside.instances[0].one_per_node, beside.gang.one_per_node) == (True, False)


def test_parts_with_tls_have_the_applications_own_registry() -> None:
    made = plan({"model": "m", "tls_cert": "c", "tls_key": "k", "tls_ca": "a"})
    assert (made.registry, made.frontend.config.tls.enabled) == (None, True)


def test_unified_alone_needs_no_other_instance() -> None:
    made = plan({"model": "m", "unified": {}})
    assert [(part.role, part.replicas) for part in made.instances] == [(Role.UNIFIED, 1)]


def test_resources_and_a_registry_of_your_own() -> None:
    made = plan(
        {
            "model": "m",
            "registry": "etcd://10.0.0.1:2379",
            "prefill": {"resources": {"fast": 1}, "one_per_node": True},
        }
    )
    assert made.registry == "etcd://10.0.0.1:2379"
    assert (made.instances[0].resources, made.instances[0].one_per_node) == ({"fast": 1}, True)
    assert (made.instances[1].resources, made.instances[1].one_per_node) == ({}, False)


def test_ray_can_carry_a_plan() -> None:
    """Ray pickles what an actor is made with."""
    made = plan(TWO)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  its own bytes


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "takes a dictionary of settings, not list"),
        ({}, "needs --model"),
        ({"model": "m", "modle": "x"}, "modle in build_app is not a setting (did you mean model?)"),
        (
            {"model": "m", "prefil": {}},
            "[prefil] in build_app is not a command of segue (did you mean prefill",
        ),
        (
            {"model": "m", "decode": {"replicsa": 2}},
            "replicsa in [decode] of build_app is not a setting (did",
        ),
        ({"model": "m", "decode": {"replicas": -1}}, "Expected `int` >= 0 - at `$.replicas`"),
        ({"model": "m", "decode": {"replicas": "2"}}, "Expected `int"),
        ({"model": "m", "decode": {"resources": {"x": "y"}}}, "Expected `float`, got `str`"),
        ({"model": "m", "decode": 3}, "decode in build_app must be a dictionary of settings, not 3"),
        ({"model": "m", "decode": {"max_batch": 0}}, "must be between 1 and 65536, not 0"),
        ({"model": "m", "decode": {"replicas": 0}}, "needs replicas of prefill and of decode"),
        ({"model": "m", "frontend": {"replicas": 0}}, "needs at least one of replicas in [frontend]"),
        ({"model": "m", "pairs": -1}, "Expected `int` >= 0 - at `$.pairs`"),
        ({"model": "m", "registry": "nowhere"}, "--registry must look like"),
        ({"model": "m", "host": "10.0.0.1"}, "host in build_app: each actor takes the address of its node"),
        ({"model": "m", "decode": {"http-port": 1}}, "http-port in build_app: each actor takes the address"),
        ({"model": "m", "replicas": 3}, "replicas in build_app: each role has its own; give it in a table"),
        (
            {"model": "m", "decode": {"registry": "etcd://10.0.0.1:2379"}},
            "registry in [decode] of build_app: all parts have one registry; give it at the top",
        ),
        ({"model": "m", 1: 2}, "1 in build_app is not a setting"),
        ({"model": "m", "decode": {1: 2}}, "1 in build_app is not a setting"),
        ({"model": "m", "decode": {"cpus": float("inf")}}, "- at `$.cpus`"),
        ({"model": "m", "decode": {"resources": {"x": -1}}}, "Expected `float` >= 0.0 - at `$.resources"),
        ({"model": "m", "pairs": 1, "decode": {"one_per_node": True}}, "a pair is packed on one node"),
        ({"model": "m", "shutdown_delay_s": 60}, "shutdown_delay_s in build_app: Serve stops sending"),
        ({"model": "m", "prefill": {"dp": 2}}, "dp in build_app: give more replicas"),
        ({"model": "m", "frontend": {"https_cert": "c"}}, "TLS for clients belongs before Ray's proxy"),
        ({"model": "m", "frontend": {"api_key": "geheim"}}, "give api_key_file"),
    ],
)
def test_a_wrong_entry_is_one_sentence_that_names_it(config: Any, says: str) -> None:
    with pytest.raises(ConfigError) as found:
        plan(config)
    assert says in found.value.info.text
    assert "\n" not in found.value.info.text
    assert "geheim" not in found.value.info.text
