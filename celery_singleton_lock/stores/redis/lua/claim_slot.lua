-- Claim the due slot of a beat entry, note that it was sent, or forget the entry.
--
-- The slots are one hash. The field of an entry has the due time and the fence of the slot that was claimed last, and when
-- the entry was last sent, or began. The field '\31' <hostname>:<pid> is the leader's own: when it was seen, its fence, and
-- that time again. The heir of a leader that died before it sent a claimed slot may claim the slot again.
--
-- KEYS[1]  hash of the slots
-- @argument entry
-- @argument due    microseconds.
-- @argument fence  the fence of the caller's lease.
-- @argument sent   microseconds, 0 to claim the slot, or -1 to forget the entry.
-- @argument lasts  milliseconds for which the slot is remembered.
--
-- Returns  1 claimed, noted or forgotten | 0 the slot was sent already, or a later leader has come

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
