"""Time for the locks in a real server, whose clock cannot be set."""

from typing import Any

_MOVE = """
-- ARGV[1]  the server's time at which the locks stand still, in milliseconds, or 0 for now
-- ARGV[2]  milliseconds to make them older
-- Returns  the server's time
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local marks = {queued = true, cooldown = true}
local older = ARGV[2] - (now - (ARGV[1] == '0' and now or ARGV[1]))

local function moved(moment)
  return moment == '0' and '0' or string.format('%.0f', moment - older * 1000)
end

local function grant_moved(value)
  local since, ahead, rest, published = string.match(value, '^(%d+) (%S+)( .* )(%d+)$')
  -- A fence is no time, so it stays.
  return moved(since) .. ' ' .. string.format('%.0f', ahead + older * 1000) .. rest .. moved(published)
end

local function successor_moved(value)
  local deadline, supersedes, published, rest = string.match(value, '^(%d+) (%d+) (%d+)( .*)$')
  return moved(deadline) .. ' ' .. moved(supersedes) .. ' ' .. moved(published) .. rest
end

local function marker_moved(value)
  local deadline, what, at = string.match(value, '^(%d+)( %d+ %S+ )(%d+)$')
  return moved(deadline) .. what .. moved(at)
end

local function lock_moved(key)
  local fields, tokens = redis.call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    if string.match(fields[i], '^%d+$') then
      tokens[fields[i + 1]], tokens['!' .. fields[i + 1]] = true, true
    end
  end
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    local moment, rest = string.match(value, '^(%d+)( .*)$')
    if tokens[field] then
      redis.call('HSET', key, field, moved(value))
    elseif string.match(field, '^%d+:$') then
      redis.call('HSET', key, field, grant_moved(value))
    elseif field == 'next' then
      redis.call('HSET', key, field, successor_moved(value))
    elseif string.match(field, '^done:') then
      redis.call('HSET', key, field, marker_moved(value))
    elseif moment and (marks[field] or string.match(field, '^q%d+$')) then
      redis.call('HSET', key, field, moved(moment) .. rest)
    end
  end
end

for _, key in ipairs(redis.call('KEYS', '*')) do
  lock_moved(key)
  local expiry = redis.call('PTTL', key)
  if expiry < 0 then
    return redis.error_reply(key .. ' has no expiry')
  end
  redis.call('PEXPIRE', key, expiry - older)
end
return now
"""


class StandingClock:
    """A server's time as its locks see it: it stands still, but for `advance`."""

    def __init__(self, client: Any) -> None:
        self._move = client.register_script(_MOVE)
        self._at = 0

    def microseconds(self) -> int:
        return self._at * 1000

    def advance(self, seconds: float = 0.0) -> None:
        """Make every lock older by *seconds*; one whose expiry has come is gone."""
        self._at = self._move(args=[self._at, round(seconds * 1000)])
