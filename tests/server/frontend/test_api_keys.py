"""API keys at the public door: everything but the probes needs one, and none is ever shown."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running, serve

from segue.kv.errors import ConfigError
from segue.server.frontend.http_call import KeyOwner
from segue.server.frontend.keys import MAX_KEY_CHARS, ApiKeys, read_keys
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.settings.shared_config import AccessConfig

KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/integrity"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("GET", "/health_generate"),
    ("GET", "/ready/x"),
    ("GET", "/x//health"),
    ("OPTIONS", "/v1/chat/completions"),
]
WRONG = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": KEYS[0]},
    {"Authorization": f"Basic {KEYS[0]}"},
    {"Authorization": f"Bearer {KEYS[0]}x"},
    {"Authorization": f"Bearer {KEYS[0][:-1]}"},
    {"Authorization": f"Bearer {KEYS[0]} {KEYS[1]}"},
    {"Authorization": f"Bearer {KEYS[0].upper()}"},
    {"X-Api-Key": "wrong"},
    {"X-Api-Key": KEYS[0], "Authorization": "Bearer wrong"},
]


@pytest.fixture
def locked(backend: FakeBackend, tokenizer: ModelTokenizer) -> Any:
    with serve(backend, tokenizer, keys=KEYS) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_everything_but_the_probes_needs_a_key(
    locked: Running, backend: FakeBackend, method: str, path: str
) -> None:
    answer = locked.http.request(method, path, json=HI if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert backend.requests == []
    assert locked.metric("segue_requests_total", endpoint="any", outcome="UNAUTHORIZED") == 1


def test_probes_need_none(locked: Running) -> None:
    assert locked.http.get("/health").status_code == 200
    assert locked.http.get("/ready").status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_is_there_for_load_balancers_and_claude_code(locked: Running, method: str) -> None:
    """It was a 404, or a 401."""
    for _ in range(2):  # on one connection
        answer = locked.http.request(method, "/")
        assert (answer.status_code, answer.text == "") == (200, method == "HEAD")


@pytest.mark.parametrize("headers", WRONG)
def test_a_wrong_header_is_no_key(locked: Running, headers: dict[str, str]) -> None:
    assert locked.http.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_opens(locked: Running, key: str, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {key}"}
    assert locked.post("/v1/chat/completions", HI, headers=headers).status_code == 200
    assert locked.http.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize("values", [("wrong", KEYS[0]), (KEYS[0], "wrong"), (KEYS[0], KEYS[0])])
def test_two_headers_are_no_key_whichever_is_right(locked: Running, values: tuple[str, str]) -> None:
    both = [("Authorization", f"Bearer {value}") for value in values]
    assert locked.http.get("/v1/models", headers=both).status_code == 401


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early end over the list, and no comparison but the one that takes as long for each."""
    compared: list[bool] = []
    real = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        assert len(a) == len(b) == 32
        compared.append(real(a, b))
        return compared[-1]

    monkeypatch.setattr(hmac, "compare_digest", count)
    keys = ApiKeys(KEYS)
    for shown, right in ((KEYS[0], [True, False]), (KEYS[1], [False, True]), ("x", [False, False])):
        compared.clear()
        assert (keys.owner(b"Bearer " + shown.encode()) is not None) is any(right)
        assert compared == right


def test_only_digests_are_kept() -> None:
    assert not any(key.encode() in repr(vars(ApiKeys(KEYS))).encode() for key in KEYS)


# ---- where they come from -----------------------------------------------------------------------


def test_a_file_has_one_a_line_with_comments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{KEYS[0]}\n  {KEYS[1]}  \r\n#{KEYS[0]}x\n{KEYS[0]}\n")
    file.chmod(0o600)
    assert read_keys(AccessConfig(api_key_file=str(file))) == KEYS
    assert read_keys(AccessConfig(api_key="own", api_key_file=str(file))) == ("own", *KEYS)
    assert read_keys(AccessConfig(api_key="own")) == ("own",)
    assert read_keys(AccessConfig()) == ()
    operators = tmp_path / "operators"
    operators.write_text("an-operator\n")
    operators.chmod(0o600)
    access = AccessConfig(api_key="own", operator_key_file=str(operators))
    assert read_keys(access) == ("own", "an-operator")
    keys = ApiKeys.of(access)
    assert [keys.owner(f"Bearer {key}".encode()).sees for key in read_keys(access)] == ["key 1", ""]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="--operator-key-file needs --api-key-file"):
        AccessConfig(operator_key_file=str(operators))
    assert caplog.text == ""


def test_one_key_that_is_given_twice_is_one_tenant(tmp_path: Path) -> None:
    """Its owner's requests are not told apart from themselves."""
    (tmp_path / "keys").write_text("a-key\na-key\n")
    keys = read_keys(AccessConfig(api_key="a-key", api_key_file=str(tmp_path / "keys")))
    assert keys == ("a-key",)
    assert ApiKeys(keys).owner(b"Bearer a-key") == KeyOwner()


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o602])
def test_a_file_that_others_can_read_or_change_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS[0])
    file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert read_keys(AccessConfig(api_key_file=str(file))) == KEYS[:1]
    assert "chmod 600" in caplog.text
    assert KEYS[0] not in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("good\ntwo words\n", "line 2"),
        ("käse", "line 1"),
        ("a\x01b", "line 1"),
        ("k" * (MAX_KEY_CHARS + 1), "line 1"),
        ("#" * (2**20 + 1), "more than"),
    ],
)
def test_a_file_that_is_none_is_a_wrong_setting_that_shows_no_key(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(AccessConfig(api_key_file=str(file)))
    assert "two words" not in str(caught.value)
    assert "käse" not in str(caught.value)


def test_a_file_that_is_not_there_or_a_bad_key_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(AccessConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_keys(AccessConfig(api_key_file=str(tmp_path)))
    with pytest.raises(ConfigError, match="--api-key is no key") as caught:
        read_keys(AccessConfig(api_key="hunter 2"))
    assert "hunter" not in str(caught.value)
    if os.getuid() != 0:
        file = tmp_path / "locked"
        file.write_text("k")
        file.chmod(0)
        with pytest.raises(ConfigError, match="Permission"):
            read_keys(AccessConfig(api_key_file=str(file)))


def test_requests_of_several_keys_are_told_apart_by_a_number_and_not_by_the_key(
    locked: Running, backend: FakeBackend
) -> None:
    for key, user in ((KEYS[1], "anna"), (KEYS[0], "anna"), (KEYS[1], "ben")):
        body = {**HI, "user": user, "priority": -3}
        headers = {"Authorization": f"Bearer {key}"}
        assert locked.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert [r.tenant for r in backend.requests] == ["key 2", "key 1", "key 2"]
    assert {r.priority for r in backend.requests} == {-3}


def ordered(backend: FakeBackend, tokenizer: ModelTokenizer, **settings: Any) -> list[tuple[str, int]]:
    """Tenant and priority of requests of anna, ben, anna and nobody, all of them urgent."""
    with serve(backend, tokenizer, **settings) as running:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        for more in ({"user": "anna"}, {"user": "ben"}, {"user": "anna"}, {}):
            body = HI | {"priority": -3} | more
            assert running.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    return [(r.tenant, r.priority) for r in backend.requests]


@pytest.mark.parametrize(
    ("keys", "client_order"), [(KEYS[:1], "keys"), ((), "all"), (KEYS[:1], "all")], ids=str
)
def test_of_clients_that_are_trusted_users_are_told_apart_and_priorities_count(
    keys: tuple[str, ...], client_order: str, backend: FakeBackend, tokenizer: ModelTokenizer
) -> None:
    found = ordered(backend, tokenizer, keys=keys, access=AccessConfig(client_order=client_order))
    first, second, third, fourth = (tenant for tenant, _ in found)
    assert first == third != second
    assert "anna" not in first
    assert fourth == ""
    assert {priority for _, priority in found} == {-3}


@pytest.mark.parametrize(("keys", "client_order"), [((), "keys"), ((), "none"), (KEYS[:1], "none")], ids=str)
def test_who_is_not_trusted_has_no_place_of_its_own_choice(
    keys: tuple[str, ...], client_order: str, backend: FakeBackend, tokenizer: ModelTokenizer
) -> None:
    """A new name in each request, or a low number, would put one client before all others."""
    access = AccessConfig(client_order=client_order)
    assert set(ordered(backend, tokenizer, keys=keys, access=access)) == {("", 0)}


def test_several_keys_are_tenants_also_where_what_clients_say_counts_nothing(
    backend: FakeBackend, tokenizer: ModelTokenizer
) -> None:
    found = ordered(backend, tokenizer, keys=KEYS, access=AccessConfig(client_order="none"))
    assert set(found) == {("key 1", 0)}


def salts(backend: FakeBackend) -> list[int]:
    return [request.cache_salt for request in backend.requests]


def ask_with(running: Running, key: str, **more: Any) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert running.http.post("/v1/chat/completions", json=HI | more, headers=headers).status_code == 200


def test_each_of_several_keys_has_cached_prefixes_of_its_own_and_a_salt_keeps_them_apart_further(
    locked: Running, backend: FakeBackend
) -> None:
    """`cached_tokens` told one key, page by page, what another had asked."""
    for key in (KEYS[0], KEYS[1], KEYS[0]):
        ask_with(locked, key)
    for key in KEYS[:2]:
        ask_with(locked, key, cache_salt="a", user="anna")
    first, second, third, fourth, fifth = salts(backend)
    assert first == third
    assert len({0, first, second, fourth, fifth}) == 5


@pytest.mark.parametrize("keys", [(), KEYS[:1]])
def test_with_one_key_or_none_only_a_salt_keeps_cached_prefixes_apart(
    keys: tuple[str, ...], backend: FakeBackend, tokenizer: ModelTokenizer
) -> None:
    with serve(backend, tokenizer, keys=keys) as running:
        for more in ({}, {"user": "anna"}, {"cache_salt": ""}, {"cache_salt": None}):
            ask_with(running, KEYS[0], **more)
        for salt in ("a", "b", "a", "x" * 1000):
            ask_with(running, KEYS[0], cache_salt=salt)
        for wrong in ("x" * 1001, 5, ["a"]):
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            answer = running.http.post(
                "/v1/chat/completions", json=HI | {"cache_salt": wrong}, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    found = salts(backend)
    assert found[:4] == [0] * 4
    assert found[4] == found[6]
    assert len({0, *found[4:]}) == 4
    assert all(0 <= salt < 2**63 for salt in found)


def test_keys_may_share_their_prefixes_and_those_of_a_key_do_not_depend_on_the_others() -> None:
    def domains_in(keys: ApiKeys) -> list[str]:
        found = [keys.owner(f"Bearer {key}".encode()) for key in KEYS]
        return [owner.cache_domain for owner in found if owner is not None]

    assert domains_in(ApiKeys(KEYS, "all")) == [""] * len(KEYS)
    domains = domains_in(ApiKeys(KEYS))
    assert len(set(domains)) == len(KEYS)
    assert domains_in(ApiKeys(KEYS[::-1])) == domains
    assert not any(key in domain for key, domain in zip(KEYS, domains, strict=True))
    assert domains_in(ApiKeys(KEYS[:1])) == [""]
