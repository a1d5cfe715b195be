-- Tell an operator all that is known of a lock, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {now, fence, waiters, marks, holders, turns, asked}  the greatest fence, or an empty text; the number of those
--          that wait; the marks in force, five values each: what it is, until when, task id, task name and label, or
--          empty texts; every holder, seven values each; the first of those that wait, two values each: until when
--          it has a turn, and its task id, or an empty text; for each holder, who has asked it to end, or an empty text

-- @include time
-- @include lock
-- @include marks
-- @include queue
local key = KEYS[1]
local known = redis.call('HMGET', key, 'places', 'fence', 'first', 'last', 'queued', 'quiet', 'next')
local first, last, successor, marks = tonumber(known[3]), tonumber(known[4]), successor_in(known[7]), {}

-- In a long queue, look at the first tickets only; behind them each ticket counts as a waiter.
local function look_at_queue()
  local stop = math.min(last, first + LONGEST_WALK - 1)
  local count, turns, names = last - stop, {}, {}
  for ticket = first, stop do
    names[#names + 1] = 'q' .. ticket
  end
  for _, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    local waiter = waiter_in(value)
    if waiter and waiter.deadline > now then
      count = count + 1
      turns[#turns + 1] = integer(waiter.deadline)
      turns[#turns + 1] = waiter.task_id
    end
  end
  return count, turns
end

local function add(word, deadline, task_id, task_name, label)
  for _, value in ipairs({word, integer(deadline), task_id, task_name, label}) do
    marks[#marks + 1] = value
  end
end

local function add_mark(word, value)
  local mark = mark_of(value)
  if mark then
    add(word, mark.deadline, mark.task_id, '', string.match(value, '\31(.*)$') or '')
  end
end

add_mark('queued', known[5])
if successor and successor.deadline > now then
  add('next', successor.deadline, successor.task_id, successor.task_name, '')
end
add_mark('quiet', known[6])
local waiters, turns = 0, {}
if first then
  waiters, turns = look_at_queue()
end
local holders = described(key, read_places(key, tonumber(known[1] or 1)), math.huge)
local asked = {}
for i = 2, #holders, 7 do
  asked[#asked + 1] = redis.call('HGET', key, 'broken:' .. holders[i]) or ''
end
return {now, known[2] or '', waiters, marks, holders, turns, asked}
