-- A lock that says nothing any more is deleted at once.
local function delete_if_idle(key)
  local fence, by, queued, quiet, successor = unpack(redis.call('HMGET', key, 'fence', 'next:by', 'queued', 'quiet', 'next'))
  local silent = fence and 1 or 0
  for _, mark in ipairs({queued, quiet, successor}) do
    silent = silent + (mark and not mark_of(mark) and 1 or 0)
  end
  if by and not mark_of(successor) then
    silent = silent + 1
  end
  if redis.call('HLEN', key) == silent then
    redis.call('DEL', key)
  end
end
