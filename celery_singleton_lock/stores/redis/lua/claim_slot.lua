-- Claim the due slot of a beat entry, note that it was sent, or forget the entry.
--
-- The slots are one hash: <entry> -> due and fence of the slot that was claimed last, and the time when the entry was
-- last sent, or began. The leader itself has one as well: '\31' <hostname>:<pid> -> when it was seen, its fence, the same.
-- A slot that was claimed and not sent may be claimed again, by the heir of a leader that died in between.
--
-- KEYS[1]  hash of the slots
-- @argument entry  its name
-- @argument due    when it was due, in microseconds
-- @argument fence  of the caller's lease
-- @argument sent   when it was sent, in microseconds, or 0 to claim it, or -1 to forget the entry
-- @argument lasts  milliseconds for which to remember it
--
-- Returns  1 claimed, noted or forgotten | 0 it was sent already, or a later leader has come

local known = redis.call('HGET', KEYS[1], entry)
local last_sent = '0'
if known then
  local last_due, last_fence, its_sent = string.match(known, '^(%d+) ?(%d*) ?(%d*)')
  last_sent = tonumber(its_sent) and its_sent or '0'
  local was_sent = tonumber(last_sent) >= tonumber(last_due)
  local is_over = sent == '0' and was_sent and tonumber(last_due) >= tonumber(due)
  if is_over or (tonumber(last_fence) or 0) > tonumber(fence) then
    return 0
  end
end
if sent == '-1' then
  return redis.call('HDEL', KEYS[1], entry)
elseif sent ~= '0' then
  last_sent = sent
end
redis.call('HSET', KEYS[1], entry, due .. ' ' .. fence .. ' ' .. last_sent)
redis.call('PEXPIRE', KEYS[1], lasts)
return 1
