"""Settings come from flags, then variables, then a file; a wrong one is one sentence that helps."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.engine import pool_size
from segue.engine.model_names import is_hub_name, served_name
from segue.engine.parallel import ParallelSize, share
from segue.engine.pool_size import Host, ModelSize
from segue.kv.errors import ConfigError
from segue.kv.ids import RankCoord, Role
from segue.kv.limits import Limits
from segue.server.settings import commands as c
from segue.server.settings.commands import COMMANDS, FrontendConfig, InstanceConfig, ServeConfig
from segue.server.settings.layers import Layers, argv, build, flatten, integer, parse_toml, settings
from segue.server.settings.ranks_config import RanksConfig
from segue.server.settings.shared_config import AnswersConfig, ModelConfig

KNOWN = {command: list(settings(cls)) for command, cls in COMMANDS.items()}
HOST = Host(cores=8, free_bytes=16 * 2**30)
SMOLLM2 = ModelSize(weight_bytes=270 * 2**20, token_bytes=23040, context_tokens=8192)


def serve(toml: str = "", environ: dict[str, str] | None = None, **flags: object) -> ServeConfig:
    layers = Layers(flags, environ or {}, parse_toml(toml, "segue.toml"), "segue.toml")
    return build(ServeConfig, layers, command="serve", known=KNOWN, also=["SEGUE_CONFIG"])


def instance(role: Role = Role.DECODE, toml: str = "", **flags: object) -> InstanceConfig:
    flags = {"model": "m", "registry": "http://127.0.0.1:8998"} | flags
    layers = Layers(flags, {}, parse_toml(toml, "segue.toml"), "segue.toml")
    return build(InstanceConfig, layers, command=str(role), known=KNOWN, fixed={"role": role})


def assert_refused(*fragments: str, make: Any = serve, **arguments: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert [f for f in fragments if f not in text] == [], text


def test_defaults_are_a_legal_deployment() -> None:
    config = serve()
    assert (config.model, config.port, config.prefill, config.decode) == ("smollm2", 8000, 1, 1)
    assert (config.engine.page_tokens, config.engine.chunk_tokens) == (16, 512)


def test_flag_beats_variable_beats_own_table_beats_shared_entry() -> None:
    toml = "port = 1\npage_tokens = 32\ntransport = 'tcp'\nhost = '127.0.0.2'\n"
    toml += "[serve]\nport = 2\nhost = '127.0.0.3'\ntransport = 'shm'"
    config = serve(toml, {"SEGUE_PORT": "3", "SEGUE_TRANSPORT": "fake"}, port="4")
    assert (config.port, config.transport, config.host) == (4, "fake", "127.0.0.3")
    assert config.engine.page_tokens == 32


def test_a_setting_is_also_read_under_its_old_name() -> None:
    assert serve("integrity = 'off'").kv_checksum == "off"
    assert serve("[serve]\nintegrity = 'off'").kv_checksum == "off"
    assert serve(environ={"SEGUE_INTEGRITY": "off"}).kv_checksum == "off"
    assert serve(environ={"SEGUE_INTEGRITY": "off", "SEGUE_KV_CHECKSUM": "sampled"}).kv_checksum == "sampled"


def test_values_have_their_types_from_every_source() -> None:
    config = serve("kv-gib = 2\nunified = true", {"SEGUE_THREADS_PER_WORKER": "3"}, drain_s="1.5")
    assert (config.engine.kv_gib, config.unified) == (2.0, True)
    assert (config.engine.threads_per_worker, config.limit.drain_s) == (3, 1.5)
    assert serve(environ={"SEGUE_UNIFIED": "no"}).unified is False


@pytest.mark.parametrize(
    ("fragments", "arguments"),
    [
        (("--port", "whole number", "'http'"), {"port": "http"}),
        (("--port", "between 0 and 65535", "70000"), {"port": "70000"}),
        (("--kv-gib", "nan"), {"kv_gib": "nan"}),
        (("--prefill", "between 1 and 64"), {"prefill": "0"}),
        (("--dtype", "bfloat16", "did you mean float16"), {"dtype": "flaot16"}),
        (("--model", "not empty"), {"model": " "}),
        # A variable of a script that is not set: what it is to protect must not stay open without a word.
        (("--api-key ", "not empty"), {"api_key": ""}),
        (("SEGUE_API_KEY_FILE", "not empty"), {"environ": {"SEGUE_API_KEY_FILE": ""}}),
        (("secret_file in segue.toml", "not empty"), {"toml": "secret_file = ''"}),
        (("--drain-s", "at least 0.1", "inf"), {"drain_s": "inf"}),
        (("SEGUE_PORT", "whole number"), {"environ": {"SEGUE_PORT": "1.5"}}),
        (("SEGUE_UNIFIED", "true or false"), {"environ": {"SEGUE_UNIFIED": "maybe"}}),
        (("chunk_token ", "segue.toml", "did you mean chunk_tokens"), {"toml": "chunk_token = 1"}),
        (("[serv]", "did you mean serve"), {"toml": "[serv]\nport = 1"}),
        (("registry", "[serve]"), {"toml": "[serve]\nregistry = 'http://h:1'"}),
        (("port in [serve] of segue.toml", "whole number"), {"toml": "[serve]\nport = [8000]"}),
        (("segue.toml", "not valid TOML"), {"toml": "port = = 1"}),
        (("--unified", "--prefill"), {"unified": True, "prefill": "2"}),
        (("--chunk-tokens 100", "multiple", "--page-tokens 16"), {"chunk_tokens": "100"}),
        (("--peer-silence-s 2", "--keepalive-s 2"), {"peer_silence_s": "2"}),
        (("--peer-silence-s 3.9", "--keepalive-s 2"), {"peer_silence_s": "3.9"}),
    ],
)
def test_wrong_value_is_one_sentence_that_helps(
    fragments: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    assert_refused(*fragments, **arguments)


def test_a_peer_may_be_lost_with_the_second_sign_that_does_not_come() -> None:
    assert serve(keepalive_s="2", peer_silence_s="4").limit.peer_silence_s == 4.0


def test_a_wrong_lower_layer_is_refused_even_when_a_flag_would_win() -> None:
    assert_refused("SEGUE_PORT", environ={"SEGUE_PORT": "x"}, port="1")


def test_one_file_serves_several_commands() -> None:
    toml = "model = 'm'\npage_tokens = 32\n[prefill]\nbootstrap_port = 9000\n[decode]\nport = 7001"
    assert instance(Role.PREFILL, toml, registry=None).bootstrap_port == 9000
    assert instance(Role.DECODE, toml).port == 7001
    assert serve(toml).engine.page_tokens == 32


def test_other_variables_are_left_alone() -> None:
    assert serve(environ={"PATH": "/bin", "SEGUE_CONFIG": "x.toml"}) == serve()


def test_required_settings_are_named() -> None:
    assert_refused("segue decode", "--model", "SEGUE_MODEL", make=instance, model=None)
    assert_refused("segue decode", "--registry", "SEGUE_REGISTRY", make=instance, registry=None)
    assert instance(Role.PREFILL, registry=None).registry is None


@pytest.mark.parametrize(
    "url",
    [
        *("10.0.0.1:8998", "http://host", "http://host:x", "http://:1", "ftp://h:1", "http://h:1/v1"),
        "http://h/v1:80",
    ],
)
def test_registry_url_is_checked(url: str) -> None:
    assert_refused("--registry", "http://HOST:PORT", url, make=instance, registry=url)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8998/", "etcd://a:1,b:2/", "dns://name:1", "static://[::1]:1"]
)
def test_a_registry_url_may_be_of_every_kind_and_end_with_a_slash(url: str) -> None:
    assert instance(registry=url).registry == url


def test_strangers_need_a_secret_and_a_wildcard_needs_a_name() -> None:
    assert_refused("--host 10.0.0.5", "--secret-file", make=instance, host="10.0.0.5")
    for host in ("0.0.0.0", "::"):
        assert_refused(f"--host {host}", "--advertise-host", make=instance, host=host, secret_file="s")
        config = instance(host=host, advertise_host="10.0.0.5", secret_file="s")
        assert config.peer_host == "10.0.0.5"


def test_ranks_where_there_can_be_none_are_refused_with_what_to_do() -> None:
    assert_refused("--cp 2", "which prefill computes", make=instance, role=Role.DECODE, cp="2")
    assert_refused("--tp and --pp to 1", make=instance, role=Role.UNIFIED, tp="2")
    for ranks in ("tp", "pp", "cp"):
        several: dict[str, Any] = {"role": Role.PREFILL, "send_layers": "4", ranks: "2"}
        assert_refused("--send-layers 4", "to have one rank", make=instance, **several)
    assert instance(Role.DECODE, send_layers="4", tp="2").engine.send_layers == 4
    assert_refused("--prefill-tp", make=serve, unified=True, prefill_tp="2")


def test_each_data_parallel_rank_has_ports_of_its_own_and_a_share_of_the_memory() -> None:
    four = instance(dp="4", port="7000", http_port="80", kv_gib="1")
    host = Host(cores=8, free_bytes=2**34)
    assert four.leaders == 4
    assert four.kv_bytes(host) == 2**28
    assert four.derived(host)["threads_per_worker"] == 2
    third = four.leader("a" * 32, 2)
    assert (third.port, third.http_port, third.data_port) == (7002, 82, 0)
    assert (third.dp, third.dp_rank, third.leaders) == (4, 2, 1)
    assert_refused("--http-port", "no ports for 4 ranks", make=instance, dp="4", http_port="65533")
    assert_refused("dp 2", "--dp alone", make=instance, dp="2", dp_rank="2", incarnation="a")
    assert_refused("dp 2", "--dp alone", make=instance, dp="2", dp_rank="1")


PORTS = ("port", "advertise_port", "data_port", "advertise_data_port", "http_port")


def test_no_two_ranks_of_an_instance_listen_at_or_advertise_one_port() -> None:
    """Each leader has one of each kind, and of those for data as many as it has workers."""
    firsts = {name: 7000 + 100 * at for at, name in enumerate(PORTS)}
    config = instance(Role.PREFILL, dp="3", tp="2", **{name: str(port) for name, port in firsts.items()})
    for rank in range(3):
        one = config.leader("a" * 32, rank)
        got = {name: getattr(one, name) - first for name, first in firsts.items()}
        assert got == {name: rank * (2 if "data" in name else 1) for name in PORTS}
    for name in ("data_port", "advertise_data_port"):
        last: dict[str, Any] = {"role": Role.PREFILL, "dp": "2", "tp": "2", name: str(2**16 - 4)}
        assert getattr(instance(**last), name) == 2**16 - 4
        flag = "--" + name.replace("_", "-")
        assert_refused(f"{flag} 65533 leaves no ports", make=instance, **{**last, name: str(2**16 - 3)})


def test_kv_events_need_a_port_for_each_leader_of_each_kind() -> None:
    two = {"kv_events_port": "5557", "kv_events_replay_port": "5559"}
    assert serve(**two).events == instance(dp="2", **two).events
    both = ("--kv-events-port 5557", "5559 must be 3 apart")
    assert_refused(*both, decode="2", **two)
    assert_refused(*both, decode_dp="2", **two)
    assert_refused(*both, make=instance, dp="3", **two)
    assert_refused("65534 leaves no ports for 3 ranks", decode="2", kv_events_port="65534")
    assert serve(decode="2", kv_events_port="65533").events.kv_events_port == 65533
    after = serve(**two).events.after(2)
    assert (after.kv_events_port, after.kv_events_replay_port) == (5559, 5561)
    assert serve(kv_events_port="5557").events.after(2).kv_events_replay_port is None
    assert_refused("need --kv-events-port", kv_events_topic="kv")


def test_the_ranks_of_a_deployment_share_its_host() -> None:
    config = ServeConfig(
        prefill=2, ranks=RanksConfig(prefill_dp=3, decode_dp=2), answers=AnswersConfig(policy="total_tokens")
    )
    host = Host(cores=16, free_bytes=2**34)
    assert config.workers == 8
    prefill = config.instance(Role.PREFILL, "p", host, "http://h:1")
    assert (prefill.dp, prefill.load_balance) == (3, "total_tokens")
    assert prefill.engine.threads_per_worker == 2
    assert config.instance(Role.DECODE, "d", host, "http://h:1").dp == 2
    given = dataclasses.replace(config, engine=ModelConfig(kv_gib=0.75))
    assert given.instance(Role.PREFILL, "p", host, "http://h:1").engine.kv_gib == 0.25
    three = dataclasses.replace(config, ranks=RanksConfig(prefill_tp=2, prefill_cp=2, decode_pp=3))
    assert three.workers == 2 * 4 + 3
    made = [three.instance(role, "x", host, "http://h:1").size for role in (Role.PREFILL, Role.DECODE)]
    assert made == [ParallelSize(tp=2, cp=2), ParallelSize(pp=3)]
    with pytest.raises(ConfigError, match="either of them ranks"):
        ServeConfig(unified=True, ranks=RanksConfig(decode_dp=2))


def test_the_secret_is_never_printed() -> None:
    config = build(
        FrontendConfig,
        Layers({"registry": "http://h:1"}),
        command="frontend",
        known=KNOWN,
        fixed={"secret": b"hunter2"},
    )
    assert config.secret == b"hunter2"
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr([config.derived(), flatten(config), argv(config)])


def test_argv_builds_the_same_configuration_again() -> None:
    given = {
        "name": "-odd name",
        "page_tokens": "32",
        "chunk_tokens": "64",
        "kv_gib": "0.5",
        "max_batch": "7",
        "http_port": "0",  # a free one, which is not none
    }
    config = instance(Role.PREFILL, **given)
    flags = {}
    for word in argv(config):
        flag, equals, value = word.removeprefix("--").partition("=")
        flags[flag.replace("-", "_")] = value if equals else True
    again = build(InstanceConfig, Layers(flags), command="prefill", known=KNOWN, fixed={"role": Role.PREFILL})
    assert again == config


#: Settings of `segue serve` that its children do not get as they are, and why.
NOT_HANDED_ON = {
    "instance": {
        *("host", "port", "bootstrap_port"),  # those of its door and of its registry
        # Its instances have no door for clients.
        *("api_key", "api_key_file", "operator_key_file", "client_order", "prefix_cache_sharing"),
        "allowed_hosts",
        # Each has ports of its own; the others need a port: test_supervisor.py.
        *("kv_events_port", "kv_events_replay_port", "kv_events_host", "kv_events_topic"),
        *("secret_file", "revision"),  # a secret of this run; the model is a path by now
        *("tls_cert", "tls_key", "tls_ca"),  # all three or none: `test_tls_settings.py`
        "enable_expert_parallel",  # where it has several DP ranks
    },
    "frontend": {
        *("secret_file", "revision", "cache", "tls_cert", "tls_key", "tls_ca"),
        *("https_cert", "https_key"),  # both or none: the next test
    },
}


@pytest.mark.parametrize("child", sorted(NOT_HANDED_ON))
@pytest.mark.parametrize("key", sorted(settings(ServeConfig)))
def test_what_serve_is_told_reaches_its_children(key: str, child: str) -> None:
    setting = settings(ServeConfig)[key]
    cls = InstanceConfig if child == "instance" else FrontendConfig
    if key not in settings(cls) or key in NOT_HANDED_ON[child]:
        return
    value: object = {"chunk_tokens": 1024, "keepalive_s": 1.5, "kv_gib": 0.5}.get(key)
    value = "https://page.example" if key == "allowed_origins" else value
    if value is None and setting.kind == "text":
        value = next((c for c in setting.choices if c != setting.default), "another")
    elif value is None:
        default = setting.default
        value = 2 * default if isinstance(default, int | float) and default else max(setting.low, 3)
    beside = {"api_key_file": "keys"} if key == "operator_key_file" else {}
    config = serve(**{key: str(value)}, **beside)
    http = "http://127.0.0.1:9"
    made = config.frontend(http) if child == "frontend" else config.instance(Role.DECODE, "d", HOST, http)
    assert (made.access.api_key if setting.secret else flatten(made)[key]) == value


def test_the_certificate_for_clients_reaches_the_frontend() -> None:
    made = serve(https_cert="c", https_key="k").frontend("http://127.0.0.1:9")
    assert (made.clients.https_cert, made.clients.https_key) == ("c", "k")
    with pytest.raises(ConfigError, match="together"):
        serve(https_cert="c")


def test_the_doors_of_the_instances_of_serve_are_for_probes_alone() -> None:
    """They are open to everybody on this host: no client asks there, past the frontend's keys."""
    for doors in (False, True):
        config = serve(instance_doors=doors or None)
        made = config.instance(Role.DECODE, "d", HOST, "http://127.0.0.1:9")
        assert (made.door, made.http_port) == ("probes", 0 if doors else None)


def test_every_limit_that_can_be_set_has_the_default_of_core() -> None:
    # Log-probabilities of a prompt travel with its KV; and both halves of a request are posted at once.
    assert serve().limit.limits() == Limits(max_metadata_bytes=32 * 2**20, early_wait_s=10.0)


def test_how_requests_are_answered_reaches_the_frontend() -> None:
    assert serve().frontend("http://127.0.0.1:9").answers == c.AnswersConfig(
        max_attempts=4, sampling_defaults="model"
    )
    config = serve("max_attempts = 2", {"SEGUE_SAMPLING_DEFAULTS": "openai"})
    assert config.frontend("http://127.0.0.1:9").answers == c.AnswersConfig(
        max_attempts=2, sampling_defaults="openai"
    )
    assert_refused("--max-attempts", "between 1 and 64", max_attempts="0")
    assert_refused("--sampling-defaults", "model, openai", sampling_defaults="vllm")


def test_children_inherit_what_was_decided_once() -> None:
    config = serve(prefill="2", decode="2", page_tokens="32", chunk_tokens="64", transport="shm")
    child = config.instance(Role.DECODE, "decode-1", HOST, "http://127.0.0.1:9", SMOLLM2)
    assert (child.engine.threads_per_worker, child.engine.page_tokens) == (2, 32)
    assert (child.label, child.served_model, child.transport) == ("decode-1", "smollm2", "shm")
    assert child.kv_bytes(HOST) == config.kv_bytes(HOST, SMOLLM2)
    assert config.frontend("http://127.0.0.1:9").served_model_name == "smollm2"


@pytest.mark.parametrize(("cores", "prefill", "expected"), [(2, 1, 1), (1, 1, 1), (9, 1, 4), (8, 3, 2)])
def test_threads_are_shared_out_and_never_zero(cores: int, prefill: int, expected: int) -> None:
    config = serve(prefill=str(prefill))
    assert config.derived(Host(cores, 2**34))["threads_per_worker"] == expected


@pytest.mark.parametrize("free_gib", [1, 4, 16, 256])
@pytest.mark.parametrize("pools", [1, 2, 8])
def test_automatic_pools_leave_room(free_gib: int, pools: int) -> None:
    host = Host(4, free_gib * 2**30)
    try:
        each = pool_size.kv_pool_bytes(None, host, pools, SMOLLM2)
    except ConfigError:
        assert free_gib <= pools  # too little memory for that many copies of the weights
        return
    assert each <= pool_size.AUTO_KV_MAX_BYTES
    assert each * pools <= pool_size.AUTO_KV_SHARE * (host.free_bytes - pools * SMOLLM2.weight_bytes)


def test_automatic_pools_are_modest_whatever_the_model() -> None:
    host = Host(4, 2**40)

    def pool(token_bytes: int, context_tokens: int) -> int:
        return pool_size.kv_pool_bytes(None, host, 1, ModelSize(0, token_bytes, context_tokens))

    assert pool(2**20, 2**17) == pool_size.AUTO_KV_MAX_BYTES, "a large model"
    assert pool(2**10, 2**17) == 8 * 2**27, "eight sequences"
    assert pool(2**6, 2**10) == 64 * 2**20, "a tiny one"
    with pytest.raises(ConfigError, match="KV pools"):  # not one short sequence fits
        pool_size.kv_pool_bytes(None, Host(4, 2**30), 1, ModelSize(0, 2**24, 2**17))


def test_too_little_memory_is_said_before_anything_starts() -> None:
    assert_refused(
        "KV pools",
        "--kv-gib",
        "--dtype bfloat16",
        make=lambda: pool_size.kv_pool_bytes(None, Host(2, 2**28), 2, SMOLLM2),
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("a/b.gguf", "b"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("./Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
    ],
)
def test_served_name(model: str, name: str) -> None:
    assert served_name(model, None) == name
    assert served_name(model, "mine") == "mine"


def test_names_of_the_hub() -> None:
    for name in ("Qwen/Qwen3-0.6B", "a/b", "HuggingFaceTB/SmolLM2-135M-Instruct", "o_o/x.y"):
        assert is_hub_name(name), name
    for name in (
        "smollm2",
        "/a/b",
        "./a/b",
        "../b",
        "~/a",
        "a/b/c",
        "a/",
        "/b",
        "a/b.gguf",
        "a b/c",
        "a/b\n",
        "ä/b",
    ):
        assert not is_hub_name(name), name


def test_the_revision_is_not_handed_to_children() -> None:
    """The supervisor fetched it: they get a path, to which a revision would be refused."""
    config = serve(model="a/b", revision="v1")
    child = config.instance(Role.DECODE, "decode-0", HOST, "http://127.0.0.1:9", SMOLLM2)
    assert (config.engine.revision, child.engine.revision) == ("v1", None)
    assert config.frontend("http://127.0.0.1:9").revision is None


def childs_view(config: ServeConfig, role: Role, size: ModelSize | None) -> InstanceConfig:
    """The configuration that an instance of `segue serve` reads from its command line."""
    made = config.instance(role, "x-0", HOST, "http://127.0.0.1:9", size)
    flags: dict[str, object] = {}
    for word in argv(made):
        flag, equals, value = word.removeprefix("--").partition("=")
        flags[flag.replace("-", "_")] = value if equals else True
    return build(InstanceConfig, Layers(flags), command=str(role), known=KNOWN, fixed={"role": role})


@pytest.mark.slow
@given(
    st.floats(2**-20, 16, allow_nan=False),
    st.builds(ModelSize, st.integers(0, 2**36), st.integers(64, 2**20), st.integers(64, 2**17)),
    st.sampled_from([1, 7, 16, 512]),
)
def test_a_pool_that_serve_takes_is_the_one_its_children_make(
    kv_gib: float, size: ModelSize, page_tokens: int
) -> None:
    chunk = page_tokens * 64
    config = serve(kv_gib=repr(kv_gib), page_tokens=str(page_tokens), chunk_tokens=str(chunk))
    least = max(pool_size.LEAST_TOKENS, page_tokens) * size.token_bytes
    try:
        decided = config.kv_bytes(HOST, size)
    except ConfigError:
        assert int(kv_gib * 2**30) < least + page_tokens * size.token_bytes
        return
    child = childs_view(config, Role.DECODE, size)
    assert child.kv_bytes(HOST, size) == decided >= least


@pytest.mark.parametrize("end", ["low", "high"])
@pytest.mark.parametrize(
    "key", sorted(k for k, s in settings(ServeConfig).items() if s.kind in ("integer", "number"))
)
def test_the_ends_of_every_range_are_legal_for_children_too(key: str, end: str) -> None:
    setting = settings(ServeConfig)[key]
    value = getattr(setting, end)
    if not -1e18 < value < 1e18:
        return
    text = str(int(value)) if setting.kind == "integer" else repr(float(value))
    try:
        config = serve(**{key: text})
    except ConfigError:
        if key in ("chunk_tokens", "page_tokens", "keepalive_s", "peer_silence_s") or "kv_events" in key:
            return  # a relation to another setting
        raise
    for role in (Role.PREFILL, Role.DECODE):
        child = childs_view(config, role, None)
        assert argv(child) == argv(config.instance(role, "x-0", HOST, "http://127.0.0.1:9", None))


@pytest.mark.parametrize("size", [SMOLLM2, ModelSize(2**30, 229376, 40960)])
def test_too_small_a_pool_names_the_least_that_works(size: ModelSize) -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-gib 0\.001 holds \d+ tokens .* at least ([0-9.]+)$"
    ) as caught:
        serve(kv_gib="0.001").kv_bytes(HOST, size)
    least = str(caught.value).rpartition(" ")[2]
    assert serve(kv_gib=least).kv_bytes(HOST, size) >= 64 * size.token_bytes
    assert_refused("--kv-gib", make=lambda: serve(kv_gib=str(float(least) * 0.98)).kv_bytes(HOST, size))


@pytest.mark.parametrize(
    ("settings", "instances"),
    [
        ({}, 2),
        ({"prefill": "2", "decode": "3"}, 5),
        ({"prefill": "2", "prefill_dp": "4"}, 3),  # the ranks of an instance share its --kv-gib
        ({"prefill_tp": "2"}, 2),
        ({"unified": True}, 1),
    ],
)
def test_serve_refuses_pools_beyond_the_memory_of_all_its_instances(
    settings: dict[str, Any], instances: int
) -> None:
    host = Host(cores=8, free_bytes=30 * 2**30)
    each = 30 / instances
    serve(**settings, kv_gib=repr(each)).check_memory(host)
    serve(**settings).check_memory(host)
    beyond = serve(**settings, kv_gib=repr(each + 0.01))
    with pytest.raises(ConfigError, match=r"the 30\.00 GiB .* give at most ([0-9.]+) ") as caught:
        beyond.check_memory(host)
    assert (f"each of {instances} instances" in str(caught.value)) is (instances > 1)
    least = str(caught.value).partition("at most ")[2].partition(" ")[0]
    serve(**settings, kv_gib=least).check_memory(host)


@pytest.mark.parametrize("dp", ["1", "4"])
def test_an_instance_refuses_a_pool_beyond_its_memory(dp: str) -> None:
    host = Host(cores=8, free_bytes=30 * 2**30)
    instance(dp=dp, kv_gib="30").check_memory(host)
    assert_refused("30.00 GiB", make=lambda: instance(dp=dp, kv_gib="30.01").check_memory(host))


@pytest.mark.parametrize("dp", [2, 3])
def test_the_least_that_is_named_is_enough_for_all_dp_ranks_together(dp: int) -> None:
    with pytest.raises(ConfigError, match=r"at least ([0-9.]+)$") as caught:
        pool_size.kv_pool_bytes(0.001, HOST, dp, SMOLLM2, dp=dp)
    least = float(str(caught.value).rpartition(" ")[2])
    assert pool_size.kv_pool_bytes(least, HOST, dp, SMOLLM2, dp=dp) >= 64 * SMOLLM2.token_bytes
    with pytest.raises(ConfigError):
        pool_size.kv_pool_bytes(least * 0.98, HOST, dp, SMOLLM2, dp=dp)


@pytest.mark.parametrize("host", ["127.evil.example", "127.0.0.1.example", "localhost.example"])
def test_a_name_that_looks_like_loopback_is_not_open_without_a_secret(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        InstanceConfig(model="m", host=host, registry="http://127.0.0.1:8998")


@pytest.mark.parametrize("field", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_no_limit_is_zero_or_no_number(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be positive"):
        Limits(**{field: value})


def test_ranks_are_numbered_with_tp_fastest_and_then_cp_and_then_pp() -> None:
    size = ParallelSize(tp=2, pp=3, cp=4)
    coords = [RankCoord(pp=pp, cp=cp, tp=tp) for pp in range(3) for cp in range(4) for tp in range(2)]
    assert [size.coord(rank) for rank in range(size.ranks)] == coords


@given(st.integers(0, 100), st.integers(1, 17))
def test_shares_are_neighbours_and_as_equal_as_can_be(total: int, size: int) -> None:
    parts = [share(total, index, size) for index in range(size)]
    assert [thing for part in parts for thing in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_setting_that_occurs_twice_in_a_tree_is_a_mistake_of_ours() -> None:
    branch = dataclasses.make_dataclass("Branch", [("port", int, integer("x", 1))])
    twice = dataclasses.make_dataclass(
        "Twice",
        [("port", int, integer("x", 1)), ("branch", branch, dataclasses.field(default_factory=branch))],
    )
    with pytest.raises(ValueError, match="port occurs twice"):
        settings(twice)
