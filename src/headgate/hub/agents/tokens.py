"""The tokens of the built-in operators: the admin's, the viewer's, and that of the dashboard link."""

import hashlib
import hmac
import secrets
from sqlite3 import Connection
from typing import Final, Literal

from headgate.errors import HeadgateError
from headgate.hub.agents.names import ADMIN, VIEWER
from headgate.hub.settings import A_TOKEN, HubSettings, usable_token
from headgate.hub.storage.database import Database

DIGEST_SIZE: Final = 32
"""Bytes of a token's digest."""
_REVOKED: Final = "revoked"  # in the database, instead of a digest


class Tokens:
    """Recognizes the built-in operators by their tokens, of which it stores digests."""

    def __init__(self, database: Database, settings: HubSettings) -> None:
        self._database: Final = database
        self.given: Final = _given(settings)
        """The admin's token of the settings; "" if there is none."""
        if self.given and self.given == settings.viewer_token:
            raise HeadgateError("the viewer's token: expected another than the admin's")
        self._admin = b""
        self._viewer: Final = digest_of(settings.viewer_token) if settings.viewer_token else b""
        self._link_access: Final = settings.dashboard_link
        self.link = "" if self._link_access == "none" else f"hgl_{secrets.token_urlsafe(32)}"
        """The token in the dashboard link: valid as long as the hub runs, and stored nowhere."""
        self._link: Final = digest_of(self.link) if self.link else b""
        self.created = ""
        """The admin's token if it was created at this start, to be shown once."""

    async def start(self) -> None:
        """Use the admin's token from the settings, or the one created before, or create one.

        One that was created before and revoked is followed by none: then the admins are agents.
        """
        if self.given:
            self._admin = digest_of(self.given)
            return
        created = f"hga_{secrets.token_urlsafe(32)}"

        def store(db: Connection) -> bytes:
            row = ("admin_token", digest_of(created).hex())
            db.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", row)
            rows = db.execute("SELECT name, value FROM settings WHERE name = 'admin_token'").fetchall()
            if rows[0][1] == _REVOKED:
                return b""
            stored = next(self._database.rows.read("settings", rows, _digest, "the admin gets a new token"), None)
            if stored is None:
                db.execute("REPLACE INTO settings VALUES (?, ?)", row)
                return digest_of(created)
            return stored

        self._admin = await self._database.run(store)
        if self._admin == digest_of(created):
            self.created = created

    async def revoke_admin(self) -> None:
        """Revoke the admin's token that was created, for good: the next start creates none."""
        row = ("admin_token", _REVOKED)
        await self._database.run(lambda db: db.execute("REPLACE INTO settings VALUES (?, ?)", row))
        self._admin = b""

    @property
    def admin_kind(self) -> Literal["settings", "first_start", ""]:
        """Where the built-in admin's token comes from; "" if there is none any more."""
        if self.given:
            return "settings"
        return "first_start" if self._admin else ""

    @property
    def has_viewer(self) -> bool:
        return bool(self._viewer)

    def recognize(self, token: str) -> tuple[str, str]:
        """The role and the name of a token's holder: no role for any other token, no name for the dashboard link."""
        digest, found = digest_of(token), ("", "")
        for expected, role, name in (
            (self._link, self._link_access, ""),
            (self._viewer, VIEWER, VIEWER),
            (self._admin, ADMIN, ADMIN),
        ):
            if hmac.compare_digest(digest, expected):
                found = role, name
        return found


def digest_of(token: str) -> bytes:
    """The digest of a token. Tokens are long and random, so no slow hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _digest(row: tuple[str, str]) -> bytes:
    digest = bytes.fromhex(row[1])
    if len(digest) != DIGEST_SIZE:
        raise ValueError(f"expected {DIGEST_SIZE} bytes, got {len(digest)}")
    return digest


def _given(settings: HubSettings) -> str:
    """The admin's token from the settings, or from the file that they name."""
    if settings.admin_token or settings.admin_token_file is None:
        return settings.admin_token
    path = settings.admin_token_file
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise HeadgateError(f"{path}: expected a file with the admin's token, got: {error.strerror}") from error
    except UnicodeDecodeError:
        raise HeadgateError(f"{path}: expected a file with the admin's token, got: a binary file") from None
    try:
        return usable_token(token)
    except ValueError:
        raise HeadgateError(f"{path}: expected {A_TOKEN}") from None
