-- Numbers and moments in the form in which they are written.
local function integer(number)
  return string.format('%.0f', number)
end

-- Never shorten the expiry.
local function expire_after(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if redis.call('PEXPIRE', key, milliseconds, 'NX') == 0 then
    redis.call('PEXPIRE', key, milliseconds, 'GT')
  end
end
