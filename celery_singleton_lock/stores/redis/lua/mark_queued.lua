-- Mark a call as the one that is queued, or say which call is queued, or runs, in its stead.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  milliseconds for which the mark lasts, if nobody comes for it
-- ARGV[3]  how many runs have to go on to be in the way as well, or 0
-- ARGV[4]  milliseconds for which nothing else is published
-- ARGV[5]  its label, if it has one
--
-- Returns  1                        queued: publish it
--          {0, now, 0, '', holders} the call that is queued, else one that runs, else the one that keeps the key quiet

local key, mine, limit = KEYS[1], ARGV[1], tonumber(ARGV[3])
local labelled = ARGV[5] and mine .. '\31' .. ARGV[5] or mine

local function mark_until(milliseconds)
  return integer(now + milliseconds * 1000) .. ' ' .. labelled
end

-- Every lock has an expiry, so a hash without one has just been made by this mark.
local is_marked = redis.call('HSETNX', key, 'queued', mark_until(ARGV[2])) == 1
if is_marked and redis.call('PEXPIRE', key, ARGV[2], 'NX') == 1 then
  if ARGV[4] ~= '0' then
    set_mark(key, 'quiet', ARGV[4], mine)
  end
  return 1
end

local known = redis.call('HMGET', key, 'places', 'queued', 'quiet', 'joined')
local queued, quiet, joined = mark_of(known[2]), mark_of(known[3]), mark_of(known[4])
local is_repeated = not is_marked and queued and queued.task_id == mine

local function refuse(holders)
  if is_marked then
    redis.call('HDEL', key, 'queued')
  end
  return {0, now, 0, '', holders}
end

for _, other in pairs({queued, joined}) do
  if other.task_id ~= mine then
    return refuse(described_turns({other}))
  end
end
local places, held = {}, 0
if not is_repeated and (limit > 0 or quiet) then
  places = read_places(key, tonumber(known[1] or 1), now)
  for _, each in ipairs(places) do
    held = held + (each.alive and 1 or 0)
  end
end
if limit > 0 and held >= limit then
  return refuse(described(key, places, A_FEW))
elseif quiet and quiet.task_id ~= mine then
  return refuse(held > 0 and described(key, places, A_FEW) or described_turns({quiet}))
end
set_mark(key, 'queued', ARGV[2], labelled)
if ARGV[4] ~= '0' then
  set_mark(key, 'quiet', ARGV[4], mine)
end
return 1
