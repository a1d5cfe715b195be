-- The done marker of a message: `<attempt> <outcome> <when>` of the last of its runs that has ended.
--   retried  another attempt follows
--   ended    its result is about to be stored
--   stored   its result is there
local function read_marker(marker)
  local attempt, outcome, at = string.match(redis.call('GET', marker) or '', '^(%d+) (%S+) (%d+)$')
  return tonumber(attempt or -1), outcome, tonumber(at or 0)
end

local RESULT_GRACE = 5000000 -- a result is stored at once after its run; if none is there by then, its process has died

-- The run of this attempt, or of a later one, if it has ended.
local function past_run(marker, attempt)
  local past, outcome, at = read_marker(marker)
  if attempt <= past and (outcome ~= 'ended' or now - at < RESULT_GRACE) then
    return {3, now, past, outcome}
  end
end

-- Keep a marker of a later attempt, and the last outcome of this attempt.
local function write_marker(marker, attempt, outcome, milliseconds)
  local latest, its_outcome = read_marker(marker)
  if latest < attempt or (latest == attempt and its_outcome == 'ended') then
    redis.call('SET', marker, attempt .. ' ' .. outcome .. ' ' .. integer(now), 'PX', milliseconds)
  end
end
