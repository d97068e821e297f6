"""The table of a cluster: keys in Redis, changed by scripts that compare before they write.

    PREFIX:marker               the generation of the records, or a claim while one client rebuilds
    PREFIX:clock                "last ahead", which corrects a clock that was set back
    PREFIX:{slots,pointers}     hashes of sealed records; the empty field holds the marker and the
                                number of fields, so that a missing record is noticed

Redis may lose everything at any moment: its records can be rebuilt from elsewhere. Its values are
not trusted: their length is checked here, their content where they are opened.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from m3pc.coordinator.records import LONGEST_SEALED, RECORD_TYPES
from m3pc.coordinator.table import Deadline, RecordsLostError, TableContents, TableSnapshot
from m3pc.core.backoff import Backoff
from m3pc.types import CoordinatorUnavailableError

log = logging.getLogger(__name__)

CLAIM = "rebuilding "
CLAIM_SECONDS = 10.0  # after this time another client may rebuild
ATTEMPTS = 10  # at most, per call; its deadline may allow fewer
BACKOFF: Final = Backoff(first=0.05, longest=1.0)

# KEYS: marker, clock, then hashes. Lua's numbers are doubles, so only milliseconds pass as numbers.
PRELUDE = """
local function marker()
  local text = redis.pcall('GETRANGE', KEYS[1], 0, 255)
  return type(text) == 'string' and text or ''
end
local function time()
  local t = redis.call('TIME')
  local raw = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  local clock = redis.pcall('GETRANGE', KEYS[2], 0, 63)
  local last, ahead = string.match(type(clock) == 'string' and clock or '', '^(%d+) (%d+)$')
  if not last or #last > 15 or #ahead > 15 then last, ahead = raw, 0 end
  ahead = math.max(tonumber(ahead), tonumber(last) - raw)
  return string.format('%.0f', raw + ahead), string.format('%.0f', ahead)
end
local function tick()
  local now, ahead = time()
  redis.call('SET', KEYS[2], now .. ' ' .. ahead)
end
local function count(key, marker)
  redis.call('HSET', key, '', '')
  redis.call('HSET', key, '', marker .. ' ' .. redis.call('HLEN', key))
end
local function is_complete(key, marker)
  local size = redis.pcall('HLEN', key)
  return type(size) == 'number' and redis.call('HGET', key, '') == marker .. ' ' .. size
end
local function all(key)
  local fields = redis.pcall('HGETALL', key)
  return fields.err and {} or fields
end
"""

# ARGV: longest text, name
LOOK = """
local current = marker()
if current == '' then return {'LOST', ''} end
if string.sub(current, 1, 11) == 'rebuilding ' and redis.call('PTTL', KEYS[1]) > 0 then
  return {'BUSY', current}
end
if not is_complete(KEYS[3], current) then return {'LOST', current} end
local text = redis.call('HGET', KEYS[3], ARGV[2])
if text and #text > tonumber(ARGV[1]) then return {'LOST', current} end
return {'OK', current, (time()), text}
"""

# ARGV: marker, name, old, new
SWAP = """
if marker() ~= ARGV[1] or not is_complete(KEYS[3], ARGV[1]) then return 'CHANGED' end
local text = redis.call('HGET', KEYS[3], ARGV[2])
if text == ARGV[4] then return 'OK' end
if (text or '') ~= ARGV[3] then return 'CHANGED' end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
if not text then count(KEYS[3], ARGV[1]) end
tick()
return 'OK'
"""

# ARGV: longest text, marker as the caller read it, claim, milliseconds until the claim expires
START = """
local current = marker()
if current ~= ARGV[3] then
  if current ~= ARGV[2] then return {'CHANGED'} end
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
end
local reply = {'OK', (time())}
for i = 3, #KEYS do
  local texts = all(KEYS[i])
  local short = {}
  for j = 1, #texts, 2 do
    if #texts[j] + #texts[j + 1] <= tonumber(ARGV[1]) then
      table.insert(short, texts[j])
      table.insert(short, texts[j + 1])
    end
  end
  table.insert(reply, short)
end
return reply
"""

# ARGV: claim, marker, then (number of the hash, name, text) for each record
FINISH = """
if marker() ~= ARGV[1] then return 'CHANGED' end
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
for i = 3, #ARGV, 3 do
  redis.call('HSET', KEYS[2 + tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
for i = 3, #KEYS do count(KEYS[i], ARGV[2]) end
redis.call('SET', KEYS[1], ARGV[2])
tick()
return 'OK'
"""

SCRIPTS = {
    "look": PRELUDE + LOOK,
    "swap": PRELUDE + SWAP,
    "start": PRELUDE + START,
    "finish": PRELUDE + FINISH,
}
DIGESTS = {
    name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    for name, text in SCRIPTS.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """The address of a Redis server and the credentials for it."""

    host: str
    port: int
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None  # certificates to trust; None: the system's

    def __str__(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        user = f"{self.user}@" if self.user else ""
        return f"{scheme}://{user}{self.host}:{self.port}/{self.database}"


class RedisTable:
    """A `Table` in Redis."""

    def __init__(
        self,
        server: RedisAddress,
        *,
        prefix: str,
        patience: float = 1.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        """An attempt may wait `patience` seconds for the network. `rng` draws the pauses."""
        self._server, self._patience = server, patience
        self._rng = rng or np.random.default_rng()
        self._keys = {name: f"{prefix}:{name}" for name in ("marker", "clock", *RECORD_TYPES)}
        self._client = _client(server, patience)
        self.where = f"{server} {prefix}"

    def snapshot(self, kind: str, name: str, deadline: Deadline) -> TableSnapshot:
        attempt = 1
        while True:
            state, marker, *rest = self._run("look", [kind], [LONGEST_SEALED, name], deadline)
            if state != "BUSY":
                break
            deadline.check(self.where, "another client rebuilds it", "see whether that one hangs")
            pause = BACKOFF.jittered(attempt, self._rng)
            time.sleep(min(pause, max(0.0, deadline.remaining)))
            attempt += 1
        if state != "OK":
            raise RecordsLostError(marker)
        now, text = rest
        return TableSnapshot(marker=marker, now=int(now), text=text)

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        """Texts are unique, so a call that is repeated after a lost reply returns True too."""
        return bool(self._run("swap", [kind], [marker, name, old or "", new], deadline) == "OK")

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        claim = CLAIM + secrets.token_hex(8)
        expiry = int(CLAIM_SECONDS * 1000)
        state, *rest = self._run(
            "start", RECORD_TYPES, [LONGEST_SEALED, marker, claim, expiry], deadline
        )
        if state != "OK":
            return  # another client rebuilds the table or has done so
        now, *hashes = rest
        remains = {
            kind: {name: text for name, text in zip(flat[::2], flat[1::2], strict=True) if name}
            for kind, flat in zip(RECORD_TYPES, hashes, strict=True)
        }
        new_marker, contents = make(remains, int(now))
        records = [
            part
            for number, kind in enumerate(RECORD_TYPES, start=1)
            for item in contents[kind].items()
            for part in (number, *item)
        ]
        self._run("finish", RECORD_TYPES, [claim, new_marker, *records], deadline)

    def close(self) -> None:
        self._client.close()

    def _run(
        self, script: str, kinds: Iterable[str], arguments: Sequence[str | int], deadline: Deadline
    ) -> Any:
        """Return the script's reply; repeat failed attempts until the deadline."""
        from redis import exceptions

        keys = [self._keys[name] for name in ("marker", "clock", *kinds)]
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.evaluate(script, keys, arguments)
            except (
                exceptions.AuthenticationError,
                exceptions.AuthorizationError,
                exceptions.NoPermissionError,
            ) as error:
                raise CoordinatorUnavailableError(
                    f"{self.where} refuses us: {self._without_password(error)}; check the user, "
                    "its password and that its ACL allows these keys"
                ) from None
            except exceptions.RedisError as error:
                problem = f"{type(error).__name__}: {self._without_password(error)}"
            log.warning(
                "event=coordinator-attempt-failed where=%s script=%s attempt=%d error=%r",
                self.where,
                script,
                attempt,
                problem,
            )
            pause = BACKOFF.jittered(attempt, self._rng)
            if deadline.remaining < pause + self._patience:
                break
            time.sleep(pause)
        raise CoordinatorUnavailableError(
            f"{self.where} gave no answer in {attempt} attempts within {deadline.seconds:g} s, "
            f"the last one: {problem}; see that the server runs and can be reached from here"
        ) from None

    def evaluate(self, script: str, keys: list[str], arguments: Sequence[str | int]) -> Any:
        """Make one attempt to run a script."""
        from redis.exceptions import NoScriptError

        call = ("EVALSHA", DIGESTS[script], len(keys), *keys, *arguments)
        try:
            return self._client.execute_command(*call)
        except NoScriptError:  # a restarted or new server has no scripts
            self._client.execute_command("SCRIPT LOAD", SCRIPTS[script])
            return self._client.execute_command(*call)

    def _without_password(self, error: Exception) -> str:
        password = self._server.password
        return str(error).replace(password, "***") if password else str(error)


def _client(server: RedisAddress, patience: float) -> Any:
    """Disable the client's own retries: `RedisTable` counts, logs and limits attempts itself."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return redis.Redis(
        host=server.host,
        port=server.port,
        db=server.database,
        username=server.user,
        password=server.password,
        socket_timeout=patience,
        socket_connect_timeout=patience,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=True,
        encoding_errors="surrogateescape",  # bytes that are not UTF-8 survive a round trip
        ssl=server.tls,
        ssl_ca_certs=server.ca_file,
    )
