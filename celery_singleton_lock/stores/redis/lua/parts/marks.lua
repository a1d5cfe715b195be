-- The marks of calls that hold nothing. A mark is `<until> <task id>`, and then '\31' and a label if the call has one;
-- a mark has no effect after that time. Behind a further '\31' it has the queue of the call's message, if the publisher
-- knew that. Behind a third one, where it needs them, it has the publication of the call, or 0, and for how many
-- milliseconds the call is due until that time, or 0; and of a call that has taken the place of others, until when those
-- may come, and the publication of the first of them.
--   queued      the call that is unique in the queue
--   cooldown    the call whose publishing keeps the key in a cool-down
local task_id_of, mark_of, set_mark, read_marker, write_marker, sweep_markers
local RESULT_GRACE = 5000000 -- a result is stored at once after its run; if none is there by then, its process has died
local SAMPLE = 10 -- fields that are looked at for markers that are over

function task_id_of(value)
  return string.match(value or '', '^%d+ ([^\31]*)')
end

function mark_of(value)
  local deadline = tonumber(string.match(value or '', '^(%d+) ') or 0)
  if deadline > now then
    local label, queue, published, due_for, supersedes, first =
      string.match(value, '\31([^\31]*)\31?([^\31]*)\31?(%d*),?(%d*),?(%d*),?(%d*)')
    return {
      deadline = deadline, task_id = task_id_of(value), label = label, queue = queue, published = tonumber(published) or 0,
      due_for = tonumber(due_for) or 0, supersedes = tonumber(supersedes) or 0, first = tonumber(first) or 0,
    }
  end
end

function set_mark(key, name, milliseconds, task_id)
  redis.call('HSET', key, name, integer(now + milliseconds * 1000) .. ' ' .. task_id)
  expire_after(key, milliseconds * 1000)
end

-- The messages of which a run has ended, for later deliveries of them.
--   done:<task id>:<publication>   `<until> <attempt> <outcome> <when>` of the last of its runs that has ended
--     retried  another attempt follows
--     ended    its result is about to be stored
--     stored   its result is there
function read_marker(key, marker)
  local deadline, attempt, outcome, at = string.match(redis.call('HGET', key, marker) or '', '^(%d+) (%d+) (%S+) (%d+)')
  if deadline and tonumber(deadline) > now then
    return tonumber(attempt), outcome, tonumber(at)
  end
  return -1, '', 0
end

-- Keep a marker of a later attempt, and the last outcome of this attempt.
function write_marker(key, marker, attempt, outcome, milliseconds)
  local latest, its_outcome = read_marker(key, marker)
  if latest < attempt or (latest == attempt and its_outcome == 'ended') then
    local facts = attempt .. ' ' .. outcome .. ' ' .. integer(now)
    redis.call('HSET', key, marker, integer(now + milliseconds * 1000) .. ' ' .. facts)
    expire_after(key, milliseconds * 1000)
  end
end

-- A server deletes no single field, so a few fields at random are looked at each time, as Redis itself does with keys.
-- With one sweep for each marker that is written, about a tenth of them is over.
function sweep_markers(key)
  for _, field in ipairs(redis.call('HRANDFIELD', key, SAMPLE)) do
    if string.sub(field, 1, 5) == 'done:' and read_marker(key, field) == -1 then
      redis.call('HDEL', key, field)
    end
  end
end
