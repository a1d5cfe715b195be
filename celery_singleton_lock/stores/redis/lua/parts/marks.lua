-- Marks of calls (moments in microseconds; the last parts may be missing):
--   `queued`    the call that is unique in the queue
--   `cooldown`  the call whose publication began a cool-down
--   `<until> <task id>\31<label>\31<queue>\31<published>,<due_for>,<supersedes_until>,<first_published>`
--     due_for           milliseconds from the due time to the end of the mark; 0 if `lock_queue_ttl` ends the mark
--     supersedes_until  until then, superseded calls may still come
--     first_published   publication of the first superseded call
local RESULT_GRACE = 5000000 -- microseconds from `ended` to `stored`; a run that takes longer counts as dead
local SAMPLE = 10

local function mark_in(value, holder_state)
  local deadline, task_id = string.match(value or '', '^(%d+) ([^\31]*)')
  deadline = tonumber(deadline or 0)
  if deadline > now then
    local label, queue, published, due_for, supersedes_until, first_published =
      string.match(value, '\31([^\31]*)\31?([^\31]*)\31?(%d*),?(%d*),?(%d*),?(%d*)')
    return {
      deadline = deadline, task_id = task_id, label = label, queue = queue, published = tonumber(published) or 0,
      due_for = tonumber(due_for) or 0, supersedes_until = tonumber(supersedes_until) or 0,
      first_published = tonumber(first_published) or 0, holder_state = holder_state or 'queued', value = value,
    }
  end
end

-- The done marker of a message:
--   `done:<task id>:<published>`  `<until> <attempt> <outcome> <written_at>`
--     outcome  `retried`, `ended` (the result is not stored yet) or `stored`
local function read_marker(key, marker)
  local deadline, attempt, outcome, written_at =
    string.match(call('HGET', key, marker) or '', '^(%d+) (%d+) (%S+) (%d+)')
  if deadline and tonumber(deadline) > now then
    return tonumber(attempt), outcome, tonumber(written_at)
  end
  return -1, '', 0
end

-- Another copy may follow, so the marker lasts as long again.
local function keep_marker(key, marker)
  local deadline, facts, written_at = string.match(call('HGET', key, marker), '^(%d+)( %d+ %S+ )(%d+)')
  local lasts = deadline - written_at
  -- Answer the copy even if the server refuses writes.
  if type(redis.pcall('HDEL', key, '')) == 'number' then
    call('HSET', key, marker, integer(now + lasts) .. facts .. integer(now))
    keep_at_least(key, lasts)
  end
end

-- Redis before 7.4 cannot expire single fields, so each write deletes expired markers in a random sample.
local function write_marker(key, marker, attempt, outcome, milliseconds)
  local known_attempt, known_outcome = read_marker(key, marker)
  if known_attempt < attempt or (known_attempt == attempt and known_outcome == 'ended') then
    local facts = attempt .. ' ' .. outcome .. ' ' .. integer(now)
    call('HSET', key, marker, integer(now + milliseconds * 1000) .. ' ' .. facts)
    keep_at_least(key, milliseconds * 1000)
  end
  for _, field in ipairs(call('HRANDFIELD', key, SAMPLE)) do
    if string.sub(field, 1, 5) == 'done:' and read_marker(key, field) == -1 then
      call('HDEL', key, field)
    end
  end
end
