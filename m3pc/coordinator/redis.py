"""The table of a cluster: five keys in Redis, changed by scripts that compare before they write.

    PREFIX:marker                    says that the records are here; a claim while they are rebuilt
    PREFIX:clock                     "last ahead", by which a clock set back is put right
    PREFIX:{slots,leases,pointers}   hashes of sealed records; under no name the marker and how
                                     many they are, so that one which was removed is missed

Redis holds nothing that is not also known elsewhere: it may lose everything at any moment. It is
not trusted either: of its values only the length is looked at here, the rest where they are opened.
"""

import hashlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3pc.coordinator.records import KINDS, LARGEST
from m3pc.coordinator.table import Deadline, RecordsLostError, TableContents, TableSnapshot
from m3pc.types import CoordinatorUnavailableError

log = logging.getLogger(__name__)

CLAIM = "rebuilding "
CLAIM_SECONDS = 10.0  # then another client may rebuild
ATTEMPTS = 10  # for one call, while its deadline lets us
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds, doubled at each attempt, each cut at random

# KEYS: marker, clock, then hashes. Numbers in Lua are doubles: it is given none but milliseconds.
PRELUDE = """
local function marker()
  local found = redis.pcall('GETRANGE', KEYS[1], 0, 255)
  return type(found) == 'string' and found or ''
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
  return now
end
local function count(key, found)
  redis.call('HSET', key, '', '')
  redis.call('HSET', key, '', found .. ' ' .. redis.call('HLEN', key))
end
local function is_whole(key, found)
  local size = redis.pcall('HLEN', key)
  return type(size) == 'number' and redis.call('HGET', key, '') == found .. ' ' .. size
end
local function all(key)
  local found = redis.pcall('HGETALL', key)
  return found.err and {} or found
end
"""

# ARGV: longest text, name or nothing for all
LOOK = """
local found = marker()
if found == '' then return {'LOST', ''} end
if string.sub(found, 1, 11) == 'rebuilding ' and redis.call('PTTL', KEYS[1]) > 0 then
  return {'BUSY', found}
end
if not is_whole(KEYS[3], found) then return {'LOST', found} end
local texts = {}
if not ARGV[2] then
  texts = all(KEYS[3])
elseif redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then
  texts = {ARGV[2], redis.call('HGET', KEYS[3], ARGV[2])}
end
for _, text in ipairs(texts) do
  if #text > tonumber(ARGV[1]) then return {'LOST', found} end
end
return {'OK', found, time(), texts}
"""

# ARGV: marker, name, old, new
SWAP = """
if marker() ~= ARGV[1] or not is_whole(KEYS[3], ARGV[1]) then return 'CHANGED' end
local found = redis.call('HGET', KEYS[3], ARGV[2])
if found == ARGV[4] then return 'OK' end
if (found or '') ~= ARGV[3] then return 'CHANGED' end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
if not found then count(KEYS[3], ARGV[1]) end
tick()
return 'OK'
"""

# ARGV: longest text, marker as it was found, claim, its milliseconds
START = """
local found = marker()
if found ~= ARGV[3] then
  if found ~= ARGV[2] then return {'CHANGED'} end
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

# ARGV: claim, marker, then (which hash, name, text) of each record
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
    """Where Redis is, and as whom to speak to it."""

    host: str
    port: int
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    encrypted: bool = False
    authorities: str | None = None  # file of certificates to trust; the system's without

    def __str__(self) -> str:
        scheme = "rediss" if self.encrypted else "redis"
        user = f"{self.user}@" if self.user else ""
        return f"{scheme}://{user}{self.host}:{self.port}/{self.database}"


class RedisTable:
    def __init__(
        self,
        server: RedisAddress,
        *,
        prefix: str,
        patience: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        """`patience`: seconds that one attempt may wait for the network."""
        self._server, self._patience = server, patience
        self._rng = rng or random.Random()
        self._keys = {name: f"{prefix}:{name}" for name in ("marker", "clock", *KINDS)}
        self._client = _client(server, patience)
        self.where = f"{server} {prefix}"

    def snapshot(self, kind: str, name: str | None, deadline: Deadline) -> TableSnapshot:
        arguments: list[str | int] = [LARGEST] if name is None else [LARGEST, name]
        pauses = self._pauses()
        while True:
            state, marker, *rest = self._run("look", [kind], arguments, deadline)
            if state != "BUSY":
                break
            deadline.check(self.where, "another client rebuilds it", "see whether that one hangs")
            time.sleep(min(next(pauses), max(0.0, deadline.left)))
        if state != "OK":
            raise RecordsLostError(marker)
        now, texts = rest
        return TableSnapshot(marker=marker, now=int(now), texts=_pairs(texts))

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        """True also for a call repeated after its reply was lost: nobody else writes that text."""
        return bool(self._run("swap", [kind], [marker, name, old or "", new], deadline) == "OK")

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        claim = CLAIM + secrets.token_hex(8)
        milliseconds = int(CLAIM_SECONDS * 1000)
        state, *rest = self._run("start", KINDS, [LARGEST, marker, claim, milliseconds], deadline)
        if state != "OK":
            return  # somebody does it already
        now, *found = rest
        left = {kind: _pairs(texts) for kind, texts in zip(KINDS, found, strict=True)}
        new_marker, contents = make(left, int(now))
        records = [
            part
            for number, kind in enumerate(KINDS, start=1)
            for item in contents[kind].items()
            for part in (number, *item)
        ]
        self._run("finish", KINDS, [claim, new_marker, *records], deadline)

    def close(self) -> None:
        self._client.close()

    def _run(
        self, script: str, kinds: Iterable[str], arguments: Sequence[str | int], deadline: Deadline
    ) -> Any:
        """The script's reply, after as many attempts as it takes and the deadline allows."""
        from redis import exceptions

        keys = [self._keys[name] for name in ("marker", "clock", *kinds)]
        for attempt, pause in zip(range(1, ATTEMPTS + 1), self._pauses(), strict=False):
            try:
                return self._evaluate(script, keys, arguments)
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
            if deadline.left < pause + self._patience:
                break
            time.sleep(pause)
        raise CoordinatorUnavailableError(
            f"{self.where} gave no answer in {attempt} attempts within {deadline.seconds:g} s, "
            f"the last one: {problem}; see that the server runs and can be reached from here"
        ) from None

    def _evaluate(self, script: str, keys: list[str], arguments: Sequence[str | int]) -> Any:
        from redis.exceptions import NoScriptError

        call = ("EVALSHA", DIGESTS[script], len(keys), *keys, *arguments)
        try:
            return self._client.execute_command(*call)
        except NoScriptError:  # the server was restarted, or never knew it
            self._client.execute_command("SCRIPT LOAD", SCRIPTS[script])
            return self._client.execute_command(*call)

    def _pauses(self) -> Iterator[float]:
        longest = FIRST_PAUSE
        while True:
            yield self._rng.uniform(0, longest)
            longest = min(2 * longest, LONGEST_PAUSE)

    def _without_password(self, error: Exception) -> str:
        password = self._server.password
        return str(error).replace(password, "***") if password else str(error)


def _client(server: RedisAddress, patience: float) -> Any:
    """Without retries of its own: ours are counted, logged and end at the deadline."""
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
        encoding_errors="surrogateescape",  # garbage survives the way there and back
        ssl=server.encrypted,
        ssl_ca_certs=server.authorities,
    )


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    """Records by name; what stands under no name is none."""
    return {name: text for name, text in zip(flat[::2], flat[1::2], strict=True) if name}
