-- Claim the due slot of a beat entry, note that it was sent, or forget the entry.
--
-- The slots are one hash: <entry> -> due and fence of the slot that was claimed last, and the time when the entry was
-- last sent, or began. The leader itself has one as well: '\31' <hostname>:<pid> -> when it was seen, its fence, the same.
-- A slot that was claimed and not sent may be claimed again, by the heir of a leader that died in between.
--
-- KEYS[1]  hash of the slots
-- ARGV[1]  name of the entry
-- ARGV[2]  when it was due, in microseconds
-- ARGV[3]  fence of the caller's lease
-- ARGV[4]  when it was sent, in microseconds, or 0 to claim it, or -1 to forget the entry
-- ARGV[5]  milliseconds for which to remember it
--
-- Returns  1 claimed, noted or forgotten | 0 it was sent already, or a later leader has come

local known = redis.call('HGET', KEYS[1], ARGV[1])
local last_sent = '0'
if known then
  local due, fence, sent = string.match(known, '^(%d+) ?(%d*) ?(%d*)')
  sent = tonumber(sent) and sent or '0'
  local was_sent = tonumber(sent) >= tonumber(due)
  if (tonumber(fence) or 0) > tonumber(ARGV[3]) or (ARGV[4] == '0' and was_sent and tonumber(due) >= tonumber(ARGV[2])) then
    return 0
  end
  last_sent = sent
end
if ARGV[4] == '-1' then
  return redis.call('HDEL', KEYS[1], ARGV[1])
elseif ARGV[4] ~= '0' then
  last_sent = ARGV[4]
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. last_sent)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
