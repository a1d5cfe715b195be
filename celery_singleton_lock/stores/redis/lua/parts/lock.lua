-- The places of a lock, the holders that have them, and the answer to a caller who gets none.
local integer, words_in, expire_after, read_numbered, refused
local read_places, grant_in, grant_of, set_deadline, places_of, is_on_hold, ask_to_stop, let_holders_stay, empty_place
local described, described_turns, has_ended, note_end
local A_FEW = 8 -- so many holders, or calls that go before, are in an answer

-- Numbers and moments in the form in which they are written.
function integer(number)
  return string.format('%.0f', number)
end

-- The words of an argument, by their names: `name=value`, or a name alone, whose value is an empty text.
function words_in(text)
  local words = {}
  for name, value in string.gmatch(text or '', '([%l_]+)=?(%S*)') do
    words[name] = value
  end
  return words
end

-- Never shorten the expiry.
function expire_after(key, microseconds)
  local milliseconds = math.ceil(microseconds / 1000)
  if redis.call('PEXPIRE', key, milliseconds, 'NX') == 0 then
    redis.call('PEXPIRE', key, milliseconds, 'GT')
  end
end

-- The fields of places and holders:
--   <place>     token of its holder; one that begins with ~ keeps the place for nobody, as a cool-down, and one that begins
--               with * has the whole lock: it is granted while no place is taken, and then nobody else gets a place
--   <token>     deadline of that holder; under !<token> once it has been asked to stop
--   broken:<token>  who has asked that holder to end, if it was a person; replaced:<token>  the call, if it was a successor
--   <place>:    when it was granted, by how much its fence is greater than that, ttl in milliseconds, pid, attempt, time of
--               publication; and then words, of which an unknown one means nothing: `no-result` if nobody else can read the
--               holder's result; `ended` once its call has ended, though its run may go on. Together no more than 64 bytes
--               while its call goes on, because a longer value doubles what the hash takes
--   <place>:i   task id; <place>:h hostname; <place>:n task name where the lock has another name, and then '\31' and a label if there is one
--   <place>:c   a copy of its message has come
--   places      the highest place in use, if that is not 1
--   fence       the greatest one that was given
local FACTS = {':', ':i', ':h', ':n', ':c'}

local AT_ONCE = 1000 -- no more fields are read by one command, for Lua's stack is limited

local function read_fields(key, names)
  local values = {}
  for start = 1, #names, AT_ONCE do
    for _, value in ipairs(redis.call('HMGET', key, unpack(names, start, math.min(#names, start + AT_ONCE - 1)))) do
      values[#values + 1] = value
    end
  end
  return values
end

-- The fields whose names have a number, from `first` to `last`, between `before` and `behind`.
function read_numbered(key, before, first, last, behind)
  local names = {}
  for number = first, last do
    names[#names + 1] = before .. number .. behind
  end
  return read_fields(key, names)
end

function grant_in(value)
  local since, ahead, ttl, attempt, published = string.match(value or '', '^(%d+) ?(%S*) ?(%d*) ?%S* ?(%d*) ?(%d*)')
  local granted_at = tonumber(since) or 0
  return {
    since = granted_at, fence = granted_at + (tonumber(ahead) or 0), ttl = tonumber(ttl) or 0,
    attempt = tonumber(attempt) or 0, published = tonumber(published) or 0,
  }
end

function grant_of(key, place)
  return grant_in(redis.call('HGET', key, place .. ':'))
end

-- Whether a call has ended whose run may hold the place still.
function has_ended(grant)
  return string.find((grant or '') .. ' ', ' ended ', 1, true) ~= nil
end

function note_end(key, highest, task_id)
  redis.call('HDEL', key, '') -- does nothing, but a server out of memory refuses HSET as the first write
  for place, id in ipairs(read_numbered(key, '', 1, highest, ':i')) do
    local grant = id == task_id and redis.call('HGET', key, place .. ':')
    if grant and not has_ended(grant) then
      redis.call('HSET', key, place .. ':', grant .. ' ended')
    end
  end
end

-- Whether a holder was asked to stop does not change here.
function set_deadline(key, each, deadline)
  redis.call('HSET', key, (each.asked_to_stop and '!' or '') .. each.token, integer(deadline))
end

function is_on_hold(token)
  return string.sub(token, 1, 1) == '~'
end

-- How many places the holder with this token takes, or a waiter will take.
local ALL = 1000000 -- more than any limit
function places_of(token)
  return string.sub(token, 1, 1) == '*' and ALL or 1
end

-- All places, in order: {place, token, deadline, alive, asked_to_stop}; the token is nil where the place is empty. A holder
-- is alive until its deadline, whether it was asked to stop or not.
function read_places(key, highest)
  local tokens = read_numbered(key, '', 1, highest, '')
  local names, places = {}, {}
  for place = 1, highest do
    names[place] = tokens[place] or ''
  end
  for place, deadline in ipairs(read_fields(key, names)) do
    local token, asked_to_stop = tokens[place] or nil, false
    if token and not deadline then
      deadline, asked_to_stop = redis.call('HGET', key, '!' .. token), true
    end
    deadline = tonumber(deadline or 0)
    local alive = token and deadline > now
    places[place] = {place = place, token = token, deadline = deadline, alive = alive, asked_to_stop = asked_to_stop}
  end
  return places
end

function ask_to_stop(key, each)
  if not each.asked_to_stop then
    each.asked_to_stop = true
    set_deadline(key, each, each.deadline)
    redis.call('HDEL', key, each.token)
  end
end

-- Take back the successor's request to stop, which holders may not have heard yet; not that of a person.
function let_holders_stay(key, places)
  for _, each in ipairs(places) do
    if each.alive and each.asked_to_stop and redis.call('HEXISTS', key, 'broken:' .. each.token) == 0 then
      redis.call('HDEL', key, '!' .. each.token)
      redis.call('HSET', key, each.token, integer(each.deadline))
    end
  end
end

function empty_place(key, place, token)
  local names = {place, token, '!' .. token, 'broken:' .. token, 'replaced:' .. token}
  for _, suffix in ipairs(FACTS) do
    names[#names + 1] = place .. suffix
  end
  redis.call('HDEL', key, unpack(names))
end

-- Holders in the form for callers, seven values each: place, token, deadline, grant, task id, hostname, task name.
local function add_values(holders, values)
  for _, value in ipairs(values) do
    holders[#holders + 1] = value or ''
  end
end

-- A few of the holders, among them the one whose lease ends first.
function described(key, places, most)
  local alive, holders = {}, {}
  for _, each in ipairs(places) do
    if each.alive then
      alive[#alive + 1] = each
      if each.deadline < alive[1].deadline then
        alive[1], alive[#alive] = each, alive[1]
      end
    end
  end
  for i = 1, math.min(#alive, most) do
    local place = alive[i].place
    add_values(holders, {place, alive[i].token, integer(alive[i].deadline)})
    add_values(holders, redis.call('HMGET', key, place .. ':', place .. ':i', place .. ':h', place .. ':n'))
  end
  return holders
end

-- A few of the calls that go before, described as the holders that they will be; of a grant, they have their publication.
function described_turns(turns)
  local holders = {}
  for i = 1, math.min(#turns, A_FEW) do
    local each = turns[i]
    add_values(holders, {'', each.token or '', integer(each.deadline), integer(each.published or 0), each.task_id, '', ''})
  end
  return holders
end

-- The answer to a caller who gets no place; `successor` is the task id of the call that runs next, or an empty text. One
-- that has a turn gets its rank as well, and what `looked` of acquire.lua has.
function refused(successor, holders, rank, ahead, free_in)
  return {'held', now, successor, holders, rank, ahead, free_in}
end
