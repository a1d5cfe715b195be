-- Say who holds a lock and who comes next, and change nothing.
--
-- KEYS[1]  lock key
--
-- Returns  {0, now, waiters, successor, holders}  every holder, seven values each

local key = KEYS[1]
local known = redis.call('HMGET', key, 'places', 'next', 'first', 'last')
local successor = mark_of(known[2])
local waiters = known[3] and tonumber(known[4]) - tonumber(known[3]) + 1 or 0
local holders = described(key, read_places(key, tonumber(known[1] or 1), math.huge), math.huge)
return {0, now, waiters, successor and successor.task_id or '', holders}
