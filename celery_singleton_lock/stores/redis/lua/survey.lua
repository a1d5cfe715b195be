-- Tell an operator all that is known of a lock, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {now, fence, waiters, marks, holders, turns, asked}  the greatest fence, or an empty text; the number of those
--          that wait; each mark in force: {what it is, until when, task id, task name, label, milliseconds for which it is
--          due then, or 0}, empty texts for what is not known; every holder, seven values each; each of the first that
--          wait: {until when it has a turn, task id, token}; for each holder, who has asked it to end, or an empty text;
--          why it is another program's hash, or an empty text

-- @include time
-- @include lock
-- @include marks
-- @include successor
-- @include queue
local key = KEYS[1]
local known = redis.call('HMGET', key, 'places', 'fence', 'first', 'last', 'queued', 'cooldown', 'next')
local foreign = ''
if not (known[2] or known[3] or known[5] or known[6] or known[7]) then
  for _, field in ipairs(redis.call('HRANDFIELD', key, SAMPLE) or {}) do
    foreign = string.sub(field, 1, 5) == 'done:' and foreign or 'it has nothing of a lock'
  end
end
local first, last, successor = tonumber(known[3]), tonumber(known[4]), successor_in(known[7])
local marks, turns, asked, waiters = {}, {}, {}, 0

local function add(word, mark, task_name)
  if mark and mark.deadline > now then
    marks[#marks + 1] = {word, integer(mark.deadline), mark.task_id, task_name, mark.label or '', mark.due_for or 0}
  end
end

add('queued', mark_of(known[5]), '')
add('next', successor, successor and successor.task_name)
add('cooldown', mark_of(known[6]), '')
if first then
  -- In a long queue, look at the first tickets only; behind them each ticket counts as a waiter.
  local stop = math.min(last, first + LONGEST_WALK - 1)
  for _, value in ipairs(read_numbered(key, 'q', first, stop, '')) do
    local waiter = waiter_in(value)
    if waiter and waiter.deadline > now then
      turns[#turns + 1] = {integer(waiter.deadline), waiter.task_id, waiter.token}
    end
  end
  waiters = #turns + last - stop
end
local holders = described(key, read_places(key, tonumber(known[1] or 1)), math.huge)
for i = 2, #holders, 7 do
  asked[#asked + 1] = redis.call('HGET', key, 'broken:' .. holders[i]) or ''
end
return {now, known[2] or '', waiters, marks, holders, turns, asked, foreign}
