-- The queue of a lock: waiters that listen, first come, first served.
--   first, last   range of the tickets, as long as there are any
--   q<ticket>     deadline, token, limit, 1 once another delivery of its message has come or else 0, and task id of a waiter
--   w<token>      its ticket
local GRACE = 2000000 -- a waiter may be this late for its turn
local NEAR = 8 -- so many wake by themselves at the next deadline; the rest wait to be woken, and look once in a ttl
local LONGEST_WALK = 200 -- so many tickets are read by one script

local function waiter_in(value)
  local deadline, token, limit, copies, task_id = string.match(value or '', '^(%d+) (%S+) (%d+) (%d) (.*)$')
  if deadline then
    return {
      deadline = tonumber(deadline), token = token, limit = tonumber(limit), copies = copies, task_id = task_id,
    }
  end
end

local function write_waiter(key, ticket, waiter)
  local moment = integer(waiter.deadline)
  local turn = table.concat({moment, waiter.token, waiter.limit, waiter.copies, waiter.task_id}, ' ')
  return redis.call('HSET', key, 'q' .. ticket, turn, 'w' .. waiter.token, ticket)
end

-- Wake a waiter, or say that it is dead: nobody listens. If we may use no channel, that is not known.
local function wakes(key, waiter)
  return redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'free') ~= 0
end

-- A turn that was found to be over in this very script is written again where it was, before the last one.
local function join_queue(key, ticket, last, waiter)
  if write_waiter(key, ticket, waiter) > 0 and ticket > last then
    redis.call('HSETNX', key, 'first', ticket)
    redis.call('HSET', key, 'last', ticket)
  end
  expire_after(key, waiter.deadline - now)
end

local function leave_queue(key, ticket, token)
  redis.call('HDEL', key, 'q' .. ticket, 'w' .. token)
end

-- The queue begins at a later ticket now. Waiters that are near the front now have to learn the next deadline.
local function begin_queue_at(key, first, front, last)
  if front > last then
    redis.call('HDEL', key, 'first', 'last')
  elseif front > first then
    redis.call('HSET', key, 'first', front)
    for ticket = math.max(first + NEAR, front), math.min(front + NEAR - 1, last) do
      local waiter = waiter_in(redis.call('HGET', key, 'q' .. ticket))
      if waiter then
        redis.pcall('PUBLISH', key .. ':' .. waiter.token, 'near')
      end
    end
  end
end

-- Visit the living waiters in order until `visit` says `enough`. Dead waiters are removed, and those for which
-- `visit` says `gone`. After too many tickets the walk gives up. Returns the first ticket that is not known to be void.
local function walk_queue(key, first, last, visit)
  local front, names, stop = nil, {}, math.min(last, first + LONGEST_WALK - 1)
  for ticket = first, stop do
    names[#names + 1] = 'q' .. ticket
  end
  for i, value in ipairs(read_fields(key, names)) do
    local waiter, ticket = waiter_in(value), first + i - 1
    if waiter then
      local verdict = waiter.deadline <= now and 'gone' or visit(waiter, ticket)
      if verdict == 'gone' then
        leave_queue(key, ticket, waiter.token)
      else
        front = front or ticket
      end
      if verdict == 'enough' then
        return front
      end
    end
  end
  return front or stop + 1
end
