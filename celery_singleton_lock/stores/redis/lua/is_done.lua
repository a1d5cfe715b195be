-- Tell whether a run of a message has ended, to a caller that asks for the lock in another request.
--
-- KEYS[1]  done marker of the message
-- ARGV[1]  which attempt it is about
--
-- Returns  {3, now, attempt, outcome}  it has: that attempt, or a later one | 0 no such end is known

return past_run(KEYS[1], tonumber(ARGV[1])) or 0
