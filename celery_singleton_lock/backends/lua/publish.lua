-- Mark a call as the one that is queued, or say who is queued, or runs, in its stead.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  milliseconds for which the mark lasts, where nobody comes for it
-- ARGV[3]  1 if a run that goes on counts as well, or 0
-- ARGV[4]  milliseconds for which nothing else is published
--
-- Returns  {1, now}                       queued: publish it
--          {0, now, {field, value, ...}}  queued or running already: the hash as it is

local key, mine = KEYS[1], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local known = redis.call('HMGET', key, 'limit', 'queued', 'quiet')

local function whose(value)
  local deadline, task_id = string.match(value or '', '^(%d+) (.*)$')
  return deadline and tonumber(deadline) > now and task_id
end

local function runs()
  local free = 0
  for place = 1, tonumber(known[1] or 0) do
    local holder = redis.call('HGET', key, place)
    local deadlines = holder and redis.call('HMGET', key, holder, '!' .. holder)
    if not holder or tonumber(deadlines[1] or deadlines[2]) <= now then
      free = free + 1
    end
  end
  return known[1] and free == 0
end

local other = whose(known[2]) or whose(known[3])
if (other and other ~= mine) or (ARGV[3] == '1' and runs()) then
  return {0, now, redis.call('HGETALL', key)}
end
redis.call('HSET', key, 'queued', string.format('%.0f ', now + ARGV[2] * 1000) .. mine)
local longest = tonumber(ARGV[2])
if ARGV[4] ~= '0' then
  redis.call('HSET', key, 'quiet', string.format('%.0f ', now + ARGV[4] * 1000) .. mine)
  longest = math.max(longest, tonumber(ARGV[4]))
end
if redis.call('PTTL', key) < 0 then
  redis.call('PEXPIRE', key, longest)
else
  redis.call('PEXPIRE', key, longest, 'GT')
end
return {1, now}
