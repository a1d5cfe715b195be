-- The marks of calls that hold nothing:
--   `queued`    the call that is unique in the queue.
--   `cooldown`  the call whose publishing keeps the key in a cool-down.
-- A mark is `<until> <task id>`. Three parts may follow, each after a '\31': the label, the queue of the message, and four
-- numbers, 0 if unknown: the publication; how many milliseconds the mark lasts after the call's due time; the moment until
-- which superseded calls may come; the publication of the first superseded call.
local RESULT_GRACE = 5000000 -- time to store a result; a process that has not done so by then is taken for dead
local SAMPLE = 10

local function mark_of(value, word)
  local deadline, task_id = string.match(value or '', '^(%d+) ([^\31]*)')
  deadline = tonumber(deadline or 0)
  if deadline > now then
    local label, queue, published, due_for, supersedes, first =
      string.match(value, '\31([^\31]*)\31?([^\31]*)\31?(%d*),?(%d*),?(%d*),?(%d*)')
    return {
      deadline = deadline, task_id = task_id, label = label, queue = queue, published = tonumber(published) or 0,
      due_for = tonumber(due_for) or 0, supersedes = tonumber(supersedes) or 0, first = tonumber(first) or 0,
      word = word or 'queued', value = value,
    }
  end
end

-- The marker of a message, for its later deliveries: `done:<task id>:<publication>` is `<until> <attempt> <outcome> <when>`
-- of the last run that has ended. The outcomes:
--   `retried`  another attempt follows.
--   `ended`    the result is about to be stored.
--   `stored`   the result is there.
local function read_marker(key, marker)
  local deadline, attempt, outcome, at = string.match(call('HGET', key, marker) or '', '^(%d+) (%d+) (%S+) (%d+)')
  if deadline and tonumber(deadline) > now then
    return tonumber(attempt), outcome, tonumber(at)
  end
  return -1, '', 0
end

-- Keep the marker for as long again: behind a copy that was delivered late, another one may be on its way.
local function keep_marker(key, marker)
  local deadline, facts, at = string.match(call('HGET', key, marker), '^(%d+)( %d+ %S+ )(%d+)')
  local lasts = deadline - at
  -- A server that takes no writes must still answer the copy.
  if type(redis.pcall('HDEL', key, '')) == 'number' then
    call('HSET', key, marker, integer(now + lasts) .. facts .. integer(now))
    expire_after(key, lasts)
  end
end

-- Keeps a later attempt, and a later outcome of this attempt. Redis expires no single field. So each call deletes expired
-- markers among a few random fields, which keeps their share at about a tenth.
local function write_marker(key, marker, attempt, outcome, milliseconds)
  local latest, its_outcome = read_marker(key, marker)
  if latest < attempt or (latest == attempt and its_outcome == 'ended') then
    local facts = attempt .. ' ' .. outcome .. ' ' .. integer(now)
    call('HSET', key, marker, integer(now + milliseconds * 1000) .. ' ' .. facts)
    expire_after(key, milliseconds * 1000)
  end
  for _, field in ipairs(call('HRANDFIELD', key, SAMPLE)) do
    if string.sub(field, 1, 5) == 'done:' and read_marker(key, field) == -1 then
      call('HDEL', key, field)
    end
  end
end
