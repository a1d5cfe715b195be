-- End the marks of a call that holds nothing: it is no longer queued or next, and its message has no turn.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id
-- ARGV[2]  words: `cooldown` lets others be published at once; `heeds` gives way to another call that is queued; `ended` notes
--          that the call has ended, although its run may hold a place still
-- ARGV[3]  of a call that begins, and gives way to a newer one only: `rerun`, milliseconds for which it supersedes older
--          ones, publication, and its task's name where the lock has another name
--
-- Returns  1                     ended, if there was anything
--          {0, now, newer, holders} the call that is queued; the newer one in whose favour this one ends, or an empty text

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key, mine = KEYS[1], ARGV[1]
local known = redis.call('HMGET', key, 'next', 'queued', 'cooldown', 'places', 'first', 'last', 'front', 'w@' .. mine)
local successor, queued = successor_in(known[1]), mark_of(known[2])

local policy, memory, published, task_name = string.match(ARGV[3] or '', '^(%S+) (%d+) (%d+) (.*)$')
if policy then
  published = published ~= '0' and tonumber(published) or now
  local this_call = {task_id = mine, task_name = task_name, policy = policy, published = published, newest = 'queued'}
  local newer = newer_call(this_call, queued, successor)
  if newer then
    return {0, now, newer.task_id, described_turns({newer})}
  end
  local older_until = queued and (queued.task_id == mine and queued.supersedes or queued.deadline) or 0
  if older_until > 0 then
    this_call.deadline, this_call.supersedes = 0, math.max(older_until, now + memory * 1000)
    redis.call('HDEL', key, 'queued')
    set_successor(key, this_call)
  end
elseif string.find(ARGV[2], 'heeds', 1, true) and queued and queued.task_id ~= mine then
  return {0, now, '', described_turns({queued})}
end
if successor and successor.task_id == mine and not policy then
  if successor.policy == 'replace' then
    let_holders_stay(key, read_places(key, tonumber(known[4] or 1)))
  end
  redis.call('HDEL', key, 'next')
end
local was_queued = task_id_of(known[2]) == mine
if was_queued then
  redis.call('HDEL', key, 'queued')
end
if string.find(ARGV[2], 'cooldown', 1, true) and task_id_of(known[3]) == mine then
  redis.call('HDEL', key, 'cooldown')
end
if string.find(ARGV[2], 'ended', 1, true) then
  note_end(key, tonumber(known[4] or 1), mine)
end
if known[8] then
  leave_line(key, known[8], '@' .. mine)
end
-- The mark, the turn or the successor may have kept out those that wait.
local line = line_in(known[5], known[6], known[7])
if line and (known[8] or was_queued or successor and successor.task_id == mine) then
  local held = 0
  for _, each in ipairs(read_places(key, tonumber(known[4] or 1))) do
    held = held + (each.alive and places_of(each.token) or 0)
  end
  call_next(key, line, held, 0)
end
delete_if_idle(key)
return 1
