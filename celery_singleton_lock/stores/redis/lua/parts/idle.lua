-- A lock with nothing in it that still counts is deleted at once.
local function delete_if_idle(key)
  local known = redis.call('HMGET', key, 'queued', 'joined', 'quiet', 'next', 'next:by', 'fence')
  local successor, by, fence = known[4], known[5], known[6]
  local silent = fence and 1 or 0
  for _, mark in ipairs({unpack(known, 1, 4)}) do
    silent = silent + (mark and not mark_of(mark) and 1 or 0)
  end
  if by and not mark_of(successor) then
    silent = silent + 1
  end
  if redis.call('HLEN', key) == silent then
    redis.call('DEL', key)
  end
end
