"""Every setting of the hub: option, variable and file; and every error."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headgate import HeadgateError, Policy, PolicyError
from headgate.cli import build_parser
from headgate.hub.agents.tokens import Tokens
from headgate.hub.settings import HubSettings, flag, variable
from headgate.hub.sockets.relay import relay_limiter
from headgate.hub.storage.database import Database
from headgate.stores.memory import MemoryStore

ROOT = Path(__file__).parents[2]
SECRET = "a-secret-of-more-than-16-characters"

OTHERS: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "data": ("elsewhere", Path("elsewhere")),
    "store": ("redis://localhost", "redis://localhost"),
    "registration": ("invitation", "invitation"),
    "admin_token": (SECRET, SECRET),
    "admin_token_file": ("token.txt", Path("token.txt")),
    "viewer_token": (f"{SECRET}-too", f"{SECRET}-too"),
    "public_dashboard": ("true", True),
    "dashboard_link": ("viewer", "viewer"),
    "webhooks": ("https://example.org/a?b=c, http://[::1]:9", ("https://example.org/a?b=c", "http://[::1]:9")),
    "webhook_secret": (SECRET, SECRET),
    "allowed_hosts": ("Hub.example.org, *.example.net", ("hub.example.org", "*.example.net")),
    "trusted_proxies": ("10.0.0.1, fd00::/8", ("10.0.0.1/32", "fd00::/8")),
    "tls_certificate": ("c.pem", Path("c.pem")),
    "tls_key": ("k.pem", Path("k.pem")),
    "relay_rate_limit": ("off", "off"),
    "relay_rate_burst": ("20", "20"),
    "identify_within": ("2.5", 2.5),
    "max_agents": ("20", 20),
    "max_frame": ("2048", 2048),
    "max_connections": ("11", 11),
    "max_connections_per_address": ("12", 12),
    "max_connections_per_agent": ("13", 13),
    "max_http_connections": ("21", 21),
    "max_dashboards": ("10", 10),
    "max_waiting": ("13", 13),
    "max_sessions": ("14", 14),
    "max_signals": ("15", 15),
    "max_stored_signals": ("160", 160),
    "max_mail": ("16", 16),
    "max_mail_per_sender": ("12", 12),
    "max_channels_per_agent": ("18", 18),
    "max_counters": ("19", 19),
    "max_channels": ("17", 17),
    "max_history": ("18", 18),
    "max_tasks": ("19", 19),
    "max_tasks_per_agent": ("21", 21),
    "accept_within": ("20", 20.0),
    "shutdown_within": ("0", 0.0),
    "log_format": ("json", "json"),
    "log_level": ("debug", "debug"),
    "otel_endpoint": ("http://localhost:4318", "http://localhost:4318"),
}
"""Another value than the default for each setting, as text, and what it comes to."""
NAMES = [one.name for one in fields(HubSettings)]
SECRETS = [one.name for one in fields(HubSettings) if one.metadata["secret"]]


def config(folder: Path, text: str) -> Path:
    path = folder / "headgate.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_setting_has_a_value_in_these_tests() -> None:
    assert list(OTHERS) == NAMES
    assert SECRETS == ["admin_token", "viewer_token", "webhook_secret"]
    ordinary = HubSettings()
    assert all(getattr(ordinary, name) != value for name, (_, value) in OTHERS.items())


def test_the_defaults_are_those_of_the_requirements() -> None:
    ordinary = HubSettings.load({}, {})
    assert ordinary == HubSettings()
    assert (ordinary.identify_within, ordinary.max_frame, ordinary.max_connections_per_address) == (10, 65_536, 1_000)
    assert (ordinary.max_connections, ordinary.max_waiting, ordinary.max_sessions) == (10_000, 256, 1_000)
    assert (ordinary.relay_rate_limit, ordinary.relay_rate_burst) == ("1.0", "10")
    assert (ordinary.host, ordinary.registration, ordinary.store) == ("127.0.0.1", "open", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_given_by_option_by_variable_or_in_the_file(name: str, tmp_path: Path) -> None:
    text, value = OTHERS[name]
    file = config(tmp_path, f'[hub]\n{name} = "{text}"\n')
    expected = HubSettings(**{name: value})
    assert HubSettings.load({}, {variable(name): text}) == expected
    assert HubSettings.load({}, {}, file) == expected
    assert HubSettings.load({name: text}, {}) == expected
    if name not in SECRETS:
        options = vars(build_parser().parse_args(["serve", flag(name), text]))
        assert HubSettings.load({key: found for key, found in options.items() if found is not None}, {}) == expected


@pytest.mark.parametrize("name", NAMES)
def test_options_override_variables_and_variables_override_the_file(name: str, tmp_path: Path) -> None:
    text, value = OTHERS[name]
    wrong = "\0"  # where it isn't looked at, it may be anything
    file = config(tmp_path, f'[hub]\n{name} = "\\u0000"\n')
    assert getattr(HubSettings.load({name: text}, {variable(name): wrong}, file), name) == value
    assert getattr(HubSettings.load({}, {variable(name): text}, file), name) == value


def test_numbers_and_lists_in_the_file(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        '[hub]\nport = 0\nidentify_within = 1.5\ntrusted_proxies = ["10.0.0.1", "fd00::/8"]\n'
        "relay_rate_limit = 2.5\nrelay_rate_burst = 5\nmax_mail = 7\n",
    )
    found = HubSettings.load({}, {}, file)
    assert (found.port, found.identify_within, found.max_mail) == (0, 1.5, 7)
    assert found.trusted_proxies == ("10.0.0.1/32", "fd00::/8")
    assert (found.relay_rate_limit, found.relay_rate_burst) == ("2.5", "5")


def test_other_environment_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HubSettings.load({}, {"HEADGATE_REDIS_URL": "x", "PORT": "1", "headgate_port": "2"}) == HubSettings()
    monkeypatch.setenv("HEADGATE_PORT", "9001")
    assert HubSettings.load().port == 9001


def test_d4_the_relays_variables() -> None:
    settings = HubSettings.load({}, {"HEADGATE_RELAY_RATE_LIMIT": "2.5", "HEADGATE_RELAY_RATE_BURST": "4"})
    limiter = relay_limiter(settings.relay_rate_limit, settings.relay_rate_burst, MemoryStore())
    assert limiter is not None
    assert str(limiter.limit) == "2.5/second burst 4"
    assert relay_limiter("off", settings.relay_rate_burst, MemoryStore()) is None


def test_the_annotated_example_holds_the_defaults() -> None:
    assert HubSettings.load({}, {}, ROOT / "docs" / "headgate.toml") == HubSettings()


def test_a_policy_ignores_the_hub_table(tmp_path: Path) -> None:
    assert Policy.load(config(tmp_path, "[hub]\nport = 5\n")) == Policy()


# Mistakes -------------------------------------------------------------------------------------------------------------


def mistakes(*sources: Any) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        HubSettings.load(*sources)
    first, *lines = str(caught.value).splitlines()
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    assert first.endswith(f": {count}")
    assert [line.removeprefix("  ") for line in lines] == list(caught.value.mistakes)
    return list(caught.value.mistakes)


WHOLE = "a whole number from"
A_TOKEN = "at least 16 printable ASCII characters without spaces"
NETWORKS = "addresses or networks such as 10.0.0.0/8, separated by commas"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *[("port", bad, f"{WHOLE} 0 to 65535")
          for bad in ("", "http", "-1", "65536", "80.0", "1e3", "0x50", "9" * 5000)],
        *[("identify_within", bad, "a number of seconds from 0.1 to 3600")
          for bad in ("", "soon", "0", "0.09", "3601", "nan", "inf", "-1")],
        ("accept_within", "86401", "a number of seconds from 0.1 to 86400"),
        ("shutdown_within", "-1", "a number of seconds from 0 to 3600"),
        ("registration", "Open", "one of open, invitation, closed"),
        ("log_format", "xml", "one of text, json"),
        ("log_level", "trace", "one of debug, info, warning, error"),
        ("max_frame", "1023", f"{WHOLE} 1024 to 16777216"),
        ("max_connections", "0", f"{WHOLE} 1 to 1000000"),
        ("max_waiting", "100001", f"{WHOLE} 1 to 100000"),
        ("max_tasks", "10000001", f"{WHOLE} 1 to 10000000"),
        *[("trusted_proxies", bad, NETWORKS) for bad in ("proxy", "10.0.0.1/8", "10.0.0.0/8 ::1", "10.0.0.0/33")],
    ],
)  # fmt: skip
def test_a_mistake_says_where_what_was_expected_and_what_was_given(
    name: str, text: str, expected: str, tmp_path: Path
) -> None:
    file = config(tmp_path, f'[hub]\n{name} = "{text}"\n')
    assert mistakes({name: text}, {}) == [f"{flag(name)}: expected {expected}, got {text!r}"]
    assert mistakes({}, {variable(name): text}) == [f"{variable(name)}: expected {expected}, got {text!r}"]
    assert mistakes({}, {}, file) == [f"hub.{name}: expected {expected}, got {text!r}"]


@pytest.mark.parametrize("bad", ["redis//:secret@localhost", "localhost:6379", "http://localhost"])
def test_a_store_is_a_url_which_is_not_shown_since_it_may_hold_a_password(bad: str) -> None:
    forms = (
        "a URL such as redis://host:6379/0, rediss://…, unix:///path, redis+sentinel://host:26379/name, "
        "redis+cluster://host:7000 or memory://"
    )
    assert mistakes({"store": bad}, {}) == [f"--store: expected {forms}"]
    assert mistakes({}, {"HEADGATE_STORE": bad}) == [f"HEADGATE_STORE: expected {forms}"]
    for good in ("", "memory://", "valkey+cluster://localhost:7000"):
        assert HubSettings.load({"store": good}, {}).store == good


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(
    "bad", ["", "short", "fifteen-letters", "has spaces in between", "nöt-äscii-but-löng", "tab\tin-the-middle"]
)
def test_a_secret_is_never_shown(name: str, bad: str) -> None:
    assert mistakes({}, {variable(name): bad}) == [f"{variable(name)}: expected {A_TOKEN}"]


@pytest.mark.parametrize(
    "bad",
    [
        "example.org",
        "ftp://example.org",
        "https://",
        "https:///path",
        "https://example.org/#part",
        "https://example.org:99999",
        "https://[::1",
        "https://example.org, //other.example",
        "https://example.org https://other.example",
        "https://example.org\nhttps://other.example",
    ],
)
def test_webhook_urls_are_never_shown(bad: str) -> None:
    expected = "expected http:// or https:// URLs, without a fragment, separated by commas"
    assert mistakes({}, {"HEADGATE_WEBHOOKS": bad}) == [f"HEADGATE_WEBHOOKS: {expected}"]


def test_duplicate_webhook_urls_are_removed(tmp_path: Path) -> None:
    file = config(tmp_path, '[hub]\nwebhooks = ["https://a.example", "https://b.example", "https://a.example"]\n')
    assert HubSettings.load({}, {}, file).webhooks == ("https://a.example", "https://b.example")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    file = config(tmp_path, f'[hub]\nprot = 5\nadmin_tokne = "{SECRET}"\nmax_mail = true\nlog_level = "loud"\n')
    found = mistakes({"port": "x"}, {"HEADGATE_ADMIN_TOKEN": "short", "HEADGATE_LOG_LEVEL": "quiet"}, file)
    assert found == [
        "--port: expected a whole number from 0 to 65535, got 'x'",
        f"HEADGATE_ADMIN_TOKEN: expected {A_TOKEN}",
        "hub.max_mail: expected a whole number from 1 to 1000000, got 'True'",
        "HEADGATE_LOG_LEVEL: expected one of debug, info, warning, error, got 'quiet'",
        f"hub.prot: expected one of {nearest_first('port')} (did you mean port?)",
        f"hub.admin_tokne: expected one of {nearest_first('admin_token')} (did you mean admin_token?)",
    ]


def nearest_first(name: str) -> str:
    return ", ".join([name, *[one for one in NAMES if one != name]])


def test_mistakes_of_the_policy_are_reported_beside_those_of_the_hub(tmp_path: Path) -> None:
    file = config(tmp_path, '[limit]\nheavy = "5/minute"\n[hub]\nport = "x"\n')
    with pytest.raises(PolicyError) as caught:
        HubSettings.load({}, {}, file)
    text = str(caught.value)
    assert text.startswith(f"{file} and settings of the hub: 2 mistakes\n  limit: expected one of limits, warn_at, ")
    assert text.endswith("(did you mean limits?)\n  hub.port: expected a whole number from 0 to 65535, got 'x'")


def test_a_number_of_thousands_of_digits_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text(f"[hub]\nport = 0x{'f' * 5000}\n")
    assert mistakes({}, {}, file) == [
        "hub.port: expected a whole number from 0 to 65535, got an int of thousands of digits"
    ]


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    assert mistakes({}, {}, tmp_path / "none.toml") == ["expected a readable file, got: No such file or directory"]
    (told,) = mistakes({}, {}, config(tmp_path, "[hub\n"))
    assert told.startswith("expected TOML, got: Expected ']'")
    assert mistakes({}, {}, config(tmp_path, "hub = 5\n")) == ["hub: expected a table, got 5"]


def test_secrets_are_not_in_the_representation() -> None:
    password = "redis://:a-password@localhost"
    settings = HubSettings(
        admin_token=SECRET,
        viewer_token=f"{SECRET}-too",
        store=password,
        webhooks=("https://user:a-password@example.org",),
        webhook_secret=SECRET,
    )
    assert SECRET not in repr(settings)
    assert "a-password" not in repr(settings)
    assert "port=8080" in repr(settings)


# The admin's token ----------------------------------------------------------------------------------------------------


def tokens(**settings: Any) -> Tokens:
    database = Database()
    try:
        return Tokens(database, HubSettings(**settings))
    finally:
        database.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "expected a file with the admin's token, got: No such file or directory"),
        (b"\xff\xfe", "expected a file with the admin's token, got: a binary file"),
        (b"", f"expected {A_TOKEN}"),
        (b"  short\n", f"expected {A_TOKEN}"),
        (b"# the admin's token\na-token-that-is-long-enough\n", f"expected {A_TOKEN}"),
    ],
)
def test_an_invalid_token_file_is_refused_without_showing_it(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(HeadgateError) as caught:
        tokens(admin_token_file=file)
    assert str(caught.value) == f"{file}: {told}"


def test_the_viewer_token_must_differ_from_the_admin_token() -> None:
    with pytest.raises(HeadgateError, match=r"^the viewer's token: expected another than the admin's$"):
        tokens(admin_token=SECRET, viewer_token=SECRET)


def test_the_help_names_the_header_of_trusted_proxies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    assert "proxies whose X-Forwarded-For is trusted" in " ".join(capsys.readouterr().out.split())
