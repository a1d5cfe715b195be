-- The done marker of a message: `<attempt> <outcome> <when>` of the last of its runs that has ended.
--   retried  another attempt follows
--   ended    its result is about to be stored
--   stored   its result is there
local function read_marker(marker)
  local attempt, outcome, at = string.match(redis.call('GET', marker) or '', '^(%d+) (%S+) (%d+)$')
  return tonumber(attempt or -1), outcome, tonumber(at or 0)
end

-- What is known of a later attempt, or is the last word on this one, stays.
local function write_marker(marker, attempt, outcome, milliseconds)
  local latest, its_outcome = read_marker(marker)
  if latest < attempt or (latest == attempt and its_outcome == 'ended') then
    redis.call('SET', marker, attempt .. ' ' .. outcome .. ' ' .. integer(now), 'PX', milliseconds)
  end
end
