-- Tell an operator all that is known of a lock, and change nothing.
--
-- KEYS[1]  lock key
-- ARGV[1]  task id of a call that may wait, or an empty text
--
-- Returns  {now, fence, waiters, marks, holders, turn}  the greatest fence, or an empty text; the marks in force, five
--          values each: what it is, until when, task id, task name and label, or empty texts; every holder, seven
--          values each; until when that call has a turn, or an empty text

local key = KEYS[1]
local known =
  redis.call('HMGET', key, 'places', 'fence', 'first', 'last', 'queued', 'joined', 'next', 'quiet', 'next:by')
local marks = {}

-- In a long queue, look at the first tickets only; behind them each ticket counts as a waiter.
local function count_waiters(first, last)
  local stop = math.min(last, first + LONGEST_WALK - 1)
  local count, names = last - stop, {}
  for ticket = first, stop do
    names[#names + 1] = 'q' .. ticket
  end
  for _, value in ipairs(redis.call('HMGET', key, unpack(names))) do
    local waiter = waiter_of(value)
    count = count + (waiter and waiter.deadline > now and 1 or 0)
  end
  return count
end

local function turn_until(task_id)
  local ticket = task_id ~= '' and turn_of(key, task_id)
  local waiter = ticket and waiter_of(redis.call('HGET', key, 'q' .. ticket))
  return waiter and waiter.task_id == task_id and waiter.deadline > now and integer(waiter.deadline) or ''
end

for i, word in ipairs({'queued', 'queued', 'next', 'quiet'}) do
  local mark = mark_of(known[i + 4])
  if mark then
    local task_name = word == 'next' and string.match(known[9] or '', '^%d+ %S+ (.*)$') or ''
    local label = string.match(known[i + 4], '\31(.*)$') or ''
    for _, value in ipairs({word, integer(mark.deadline), mark.task_id, task_name, label}) do
      marks[#marks + 1] = value
    end
  end
end
local waiters = known[3] and count_waiters(tonumber(known[3]), tonumber(known[4])) or 0
local holders = described(key, read_places(key, tonumber(known[1] or 1), math.huge), math.huge)
return {now, known[2] or '', waiters, marks, holders, turn_until(ARGV[1])}
