-- Mark a call as the one that is queued, or tell which call is queued, or runs, in its place.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  milliseconds after which the mark ends if the call never comes
-- ARGV[3]  if at least so many runs hold the key, they are in the way as well; or 0 for never. Then, for a call that is sent in any case:
--          `anyway`: no cool-down keeps its mark off; `over`: it also takes the mark of another call over
-- ARGV[4]  milliseconds for which nothing else is published
-- ARGV[5]  its label, if it has one
--
-- Returns  1                        queued: publish it
--          {0, now, 0, '', holders} the call that is queued, else one that runs, else the one that keeps the key quiet

local limit, sent = string.match(ARGV[3], '^(%d+) ?(%a*)$')
limit = tonumber(limit)
if is_first then
  set_mark(key, 'quiet', ARGV[4], mine)
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
  if other.task_id ~= mine and not (other == queued and sent == 'over') then
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
elseif quiet and quiet.task_id ~= mine and sent == '' then
  return refuse(held > 0 and described(key, places, A_FEW) or described_turns({quiet}))
end
set_mark(key, 'queued', ARGV[2], labelled)
if ARGV[4] ~= '0' and not (quiet and quiet.task_id ~= mine) then
  set_mark(key, 'quiet', ARGV[4], mine)
end
return 1
