-- Mark a call as the one that is queued, or say who is queued, or runs, in its stead.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  milliseconds for which the mark lasts, where nobody comes for it
-- ARGV[3]  1 if a run that goes on counts as well, or 0
-- ARGV[4]  milliseconds for which nothing else is published
--
-- Returns  1                              queued: publish it
--          {0, now, {field, value, ...}}  queued or running already: the hash as it is

local key, mine = KEYS[1], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function mark_until(milliseconds)
  return string.format('%.0f ', now + milliseconds * 1000) .. mine
end

-- Every lock has an expiry, so a hash without one has just been made by this mark.
local marked = redis.call('HSETNX', key, 'queued', mark_until(ARGV[2])) == 1
local is_new = marked and redis.call('PEXPIRE', key, ARGV[2], 'NX') == 1

local function whose(mark)
  local deadline, task_id = string.match(mark or '', '^(%d+) (.*)$')
  return deadline and tonumber(deadline) > now and task_id or nil
end

local function is_running(limit)
  for place = 1, limit do
    local holder = redis.call('HGET', key, place)
    local deadlines = holder and redis.call('HMGET', key, holder, '!' .. holder)
    if not holder or tonumber(deadlines[1] or deadlines[2]) <= now then
      return false
    end
  end
  return limit > 0
end

if not is_new then
  local known = redis.call('HMGET', key, 'limit', 'queued', 'quiet')
  local queued, quiet = whose(known[2]), whose(known[3])
  local has_asked = not marked and queued == mine
  local runs = ARGV[3] == '1' and not has_asked and is_running(tonumber(known[1] or 0))
  if runs or (queued or mine) ~= mine or (quiet or mine) ~= mine then
    if marked then
      redis.call('HDEL', key, 'queued')
    end
    return {0, now, redis.call('HGETALL', key)}
  end
  redis.call('HSET', key, 'queued', mark_until(ARGV[2]))
  redis.call('PEXPIRE', key, ARGV[2], 'GT')
end
if ARGV[4] ~= '0' then
  redis.call('HSET', key, 'quiet', mark_until(ARGV[4]))
  redis.call('PEXPIRE', key, ARGV[4], 'GT')
end
return 1
