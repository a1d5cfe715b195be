-- Tell an operator all that is known of a lock, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {now, fence, waiters, marks, holders, turns, asked}  the greatest fence, or an empty text; the number of those
--          that wait; each mark in force: {what it is, until when, task id, task name, label, milliseconds for which it is
--          due then, or 0, queue}, empty texts for what is not known; every holder, seven values each; each of the first that
--          wait: {until when it has a turn, task id, token, 1 if it is unheard, its rank's moment}; each holder that a person
--          has asked to end: {its token, who has asked}; why it is another program's hash, or an empty text

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
-- In a long line, look at the first tickets only, and at the first of those that are unheard.
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
  -- Behind the first tickets each one counts as a turn.
  local stop = add_turns(line.front, line.last)
  waiters = #turns + line.last - stop
end
local places = read_places(key, tonumber(known[1] or 1))
for _, each in ipairs(places) do
  local by = each.alive and redis.call('HGET', key, 'broken:' .. each.token)
  asked[#asked + 1] = by and {each.token, by} or nil
end
return {now, known[2] or '', waiters, marks, described(key, places, math.huge), turns, asked, foreign}
