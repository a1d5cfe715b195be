-- The marks of calls that hold nothing. A mark is `<until> <task id>`, and then '\31' and a label if the call has one;
-- a mark has no effect after that time.
--   queued      the call that is unique in the queue
--   joined      the same, once it has joined a run, whose result it waits for
--   quiet       the call whose publishing keeps the key quiet
--   next        the successor, whose message is in the broker; next:by has its time of publication, its policy and its
--               task name
--   with:<id>   for a successor in whose favour other calls end
--   over:<id>   for a successor that was replaced by a newer one: the newer one
--   crowd       how many calls come again and again; crowd:<id> stands for each of them
local function task_id_of(value)
  return string.match(value or '', '^%d+ ([^\31]*)')
end

local function mark_of(value)
  local deadline = tonumber(string.match(value or '', '^(%d+) ') or 0)
  if deadline > now then
    return {deadline = deadline, task_id = task_id_of(value)}
  end
end

local function set_mark(key, name, milliseconds, task_id)
  redis.call('HSET', key, name, integer(now + milliseconds * 1000) .. ' ' .. task_id)
  expire_after(key, milliseconds * 1000)
end

-- Each call counts once, however often it comes. A server out of memory does not count, and still refuses the call.
local function join_crowd(key, task_id)
  if redis.pcall('HSETNX', key, 'crowd:' .. task_id, 1) == 1 then
    redis.call('HINCRBY', key, 'crowd', 1)
  end
end

local function leave_crowd(key, task_id)
  if redis.call('HDEL', key, 'crowd:' .. task_id) == 1 and redis.call('HINCRBY', key, 'crowd', -1) <= 0 then
    redis.call('HDEL', key, 'crowd')
  end
end
