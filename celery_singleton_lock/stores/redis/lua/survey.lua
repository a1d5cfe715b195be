-- Say all that is known of a lock to somebody who looks after it, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {now, fence, waiters, marks, holders}  the greatest fence, or an empty text; the marks in force, five values
--          each: what it is, until when, task id, task name and label, or empty texts; every holder, seven values each

local key = KEYS[1]
local known =
  redis.call('HMGET', key, 'places', 'fence', 'first', 'last', 'queued', 'joined', 'next', 'quiet', 'next:by')
local marks = {}

-- Of a long queue only the first are looked at; behind them each ticket counts.
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
return {now, known[2] or '', waiters, marks, holders}
