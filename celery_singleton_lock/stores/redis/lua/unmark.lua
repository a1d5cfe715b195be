-- End the marks of a call that holds nothing: it is no longer queued, next, overtaken or in the crowd.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  words: `quiet` lets others be published at once; `returns` leaves the crowd; `unless_merged` keeps everything
--          if other calls end in favour of this one; `unless_heard` if a holder ends for this one and knows it
--
-- Returns  1 ended, if there was anything | 0 it stays

local key, mine = KEYS[1], ARGV[1]
local known = redis.call('HMGET', key, 'next', 'queued', 'quiet', 'joined', 'next:by', 'places')

local function says(word)
  return string.find(ARGV[2], word, 1, true)
end

local function places()
  return read_places(key, tonumber(known[6] or 1), math.huge)
end

local function is_successor_that_replaces()
  return task_id_of(known[1]) == mine and string.match(known[5] or '', '^%d+ replace ')
end

local function ends_a_holder()
  for _, each in ipairs(places()) do
    if each.alive and each.has_heard then
      return is_successor_that_replaces()
    end
  end
end

if says('unless_merged') and redis.call('HEXISTS', key, 'with:' .. mine) == 1 then
  return 0
end
if says('unless_heard') and ends_a_holder() then
  return 0
end
if is_successor_that_replaces() then
  let_holders_stay(key, places())
end
if task_id_of(known[1]) == mine then
  redis.call('HDEL', key, 'next', 'next:by')
end
if task_id_of(known[2]) == mine then
  redis.call('HDEL', key, 'queued')
end
if task_id_of(known[4]) == mine then
  redis.call('HDEL', key, 'joined')
end
if says('quiet') and task_id_of(known[3]) == mine then
  redis.call('HDEL', key, 'quiet')
end
redis.call('HDEL', key, 'over:' .. mine, 'with:' .. mine)
if says('returns') then
  leave_crowd(key, mine)
end
delete_if_idle(key)
return 1
