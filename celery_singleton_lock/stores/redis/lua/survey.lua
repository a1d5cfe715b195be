-- Everything that is known of a lock, for operators. Nothing is changed.
--
-- KEYS[1]  lock key
--
-- Returns  {now, fence, waiters, marks, holders, turns, asked, foreign}, texts and numbers that are unknown are empty
--   fence    the greatest that was given
--   waiters  how many wait
--   marks    of those in force: what the mark is, its end, task id, task name, label, for how many milliseconds before its
--            end the call is due or 0, and the queue
--   holders  all of them, seven values each
--   turns    of the first that wait: the end of the turn, task id, token, 1 if unheard, the moment of its rank
--   asked    of each holder that was asked to stop: its token, and the person who has asked, if it was one
--   foreign  why this is another program's hash

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key = KEYS[1]
local known = redis.call('HMGET', key, 'places', 'fence', 'first', 'last', 'queued', 'cooldown', 'next', 'front')
local foreign = ''
if not (known[2] or known[3] or known[5] or known[6] or known[7]) then
  for _, field in ipairs(redis.call('HRANDFIELD', key, SAMPLE) or {}) do
    foreign = string.sub(field, 1, 5) == 'done:' and foreign or 'it has nothing of a lock'
  end
end
local line, successor = line_in(known[3], known[4], known[8]), successor_in(known[7])
local marks, turns, asked, waiters = {}, {}, {}, 0

local function add(word, mark, task_name)
  if mark and mark.deadline > now then
    marks[#marks + 1] = {
      word, integer(mark.deadline), mark.task_id, task_name, mark.label or '', mark.due_for or 0, mark.queue or '',
    }
  end
end

add('queued', mark_of(known[5]), '')
add('next', successor, successor and successor.task_name)
add('cooldown', mark_of(known[6]), '')
-- Of a long line, only the first tickets from `first` and from `front` are read.
local function add_turns(from, last)
  local stop = math.min(last, from + LONGEST_WALK - 1)
  for _, value in ipairs(read_numbered(key, 'q', from, stop, '')) do
    local turn = turn_in(value)
    if turn and turn.deadline > now then
      local is_unheard = turn.state == UNHEARD and 1 or 0
      turns[#turns + 1] = {integer(turn.deadline), turn.task_id, turn.token, is_unheard, integer(turn.rank)}
    end
  end
  return stop
end

if line then
  add_turns(line.first, line.front - 1)
  -- Tickets that were not read count as turns.
  local stop = add_turns(line.front, line.last)
  waiters = #turns + line.last - stop
end
local places = read_places(key, tonumber(known[1] or 1))
for _, each in ipairs(places) do
  if each.alive and each.asked_to_stop then
    asked[#asked + 1] = {each.token, redis.call('HGET', key, 'broken:' .. each.token) or ''}
  end
end
return {now, known[2] or '', waiters, marks, described(key, places, math.huge), turns, asked, foreign}
