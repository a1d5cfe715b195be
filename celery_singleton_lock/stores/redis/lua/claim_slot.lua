-- Claim a slot of a beat's entry, note that the slot was sent, or forget the entry.
--
-- KEYS[1]  hash of each entry's last slot: `<due> <fence> <sent>`. The entry of a leader is `\31<hostname>:<pid>`.
-- @argument verb   `claim`, `note` or `forget`
-- @argument entry
-- @argument due    microseconds
-- @argument fence  of the caller's lease
-- @argument sent   microseconds
-- @argument lasts  milliseconds until the hash expires
--
-- Returns  1, or 0 if the slot to claim was sent, a later leader has come, or the entry to forget is unknown

local known = redis.call('HGET', KEYS[1], entry) or '0 0 0'
local last_due, last_fence, last_sent = string.match(known, '^(%d+) (%d+) (%d+)')
local was_sent = tonumber(last_sent) >= tonumber(last_due) and tonumber(last_due) >= tonumber(due)
if tonumber(last_fence) > tonumber(fence) or verb == 'claim' and was_sent then
  return 0
elseif verb == 'forget' then
  return redis.call('HDEL', KEYS[1], entry)
end
redis.call('HSET', KEYS[1], entry, due .. ' ' .. fence .. ' ' .. (verb == 'note' and sent or last_sent))
redis.call('PEXPIRE', KEYS[1], lasts)
return 1
