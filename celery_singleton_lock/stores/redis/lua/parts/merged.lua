-- Arguments of calls that were merged, for the next run of their task. They stay until a run with them has ended for good,
-- so if its process dies, the next one takes them.
--   merged:<task name>     the newest arguments
--   merged_at:<task name>  their publication, and the milliseconds for which they are remembered
--   merged_by:<task name>  token of the run that has taken them
local function merged_at_of(value)
  local at, memory = string.match(value or '', '^(%d+) (%d+)$')
  return tonumber(at or 0), tonumber(memory or 0)
end

-- A run has taken them, and it still lives, as far as the store knows.
local function is_taken(key, by)
  if not by then
    return false
  end
  local deadline, while_it_makes_way = unpack(redis.call('HMGET', key, by, '!' .. by))
  return tonumber(deadline or while_it_makes_way or 0) > now
end

local function leave_merged(key, task_name, arguments, at, memory)
  redis.call('HSET', key, 'merged:' .. task_name, arguments, 'merged_at:' .. task_name, integer(at) .. ' ' .. memory)
  redis.call('HDEL', key, 'merged_by:' .. task_name)
  expire_after(key, memory * 1000)
end

local function forget_merged(key, task_name)
  redis.call('HDEL', key, 'merged:' .. task_name, 'merged_at:' .. task_name, 'merged_by:' .. task_name)
end

-- A call may have left newer arguments meanwhile, for the next run.
local function merged_into(key, place, token)
  local task_name = redis.call('HGET', key, place .. ':a')
  if task_name and redis.call('HGET', key, 'merged_by:' .. task_name) == token then
    return task_name
  end
end
