-- The usual mark: the call is the first of its key, so nothing can be in its way.
local key, mine = KEYS[1], ARGV[1]
local labelled = ARGV[5] and mine .. '\31' .. ARGV[5] or mine
local mark = format('%d', now + ARGV[2] * 1000) .. ' ' .. labelled
local is_marked = call('HSETNX', key, 'queued', mark) == 1
-- Every lock has an expiry, so a hash without one is new: this mark has just made it.
local is_first = is_marked and call('PEXPIRE', key, ARGV[2], 'NX') == 1
if is_first and ARGV[4] == '0' then
  return 1
end
